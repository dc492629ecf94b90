"""One isolated environment a plugin: that plugin, core, and what they declare, nothing else.

Core and its dependencies (torch among them) are installed once, into a base environment that the others look into, so
that a session costs seconds. They have pip and the build backend from it too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

ROOT = Path(__file__).parent
BASE = ROOT / ".nox" / "base"
PACKAGES = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
#: plugins that a suite needs besides its own, because it trains or generates
TEST_COMPANIONS = {
    "algo-dapo": ("algo-grpo", "backend-fsdp", "rollout-hf"),
    "algo-dpo": ("backend-fsdp", "rollout-hf"),
    "algo-grpo": ("backend-fsdp", "rollout-hf"),
    "algo-opo": ("backend-fsdp", "rollout-hf"),
    "algo-ppo": ("backend-fsdp", "rollout-hf"),
    "algo-sft": ("backend-fsdp", "rollout-hf"),
    "algo-sppo": ("backend-fsdp", "rollout-hf"),
    "algo-spin": ("backend-fsdp", "rollout-hf"),
    "backend-megatron": ("algo-dpo", "policy-losses"),
    "executor-ray": ("algo-ppo", "backend-fsdp", "hybrid-engine", "rollout-hf"),
    "hybrid-engine": ("backend-fsdp", "rollout-hf"),
    "optimizers": ("backend-fsdp",),
}
#: files or tests of a suite that are enough to show that a plugin stands alone, where the rest of it takes minutes
TEST_FILES = {
    "backend-fsdp": (
        "test_fsdp_plugin.py", "test_fsdp_forward.py", "test_fsdp_update.py", "test_fsdp_state.py",
        "test_fsdp_ranks.py",
    ),
    "backend-megatron": (
        "test_megatron_config.py", "test_megatron_cpu.py", "test_megatron_dispatch.py", "test_megatron_weights.py",
        "test_megatron_one_process.py", "test_megatron_workers.py",
    ),
    "executor-ray": ("test_ray_settings.py", "test_ray_program.py::test_a_step_of_ppo"),
    "tasks": (
        "test_plugin.py", "test_gsm8k.py", "test_gym.py", "test_math_answers.py", "test_shape.py",
        "test_side_process.py", "test_tables.py",
    ),
}  # fmt: skip
#: plugins whose suite needs what their extra `test` brings
TEST_EXTRAS = ("backend-fsdp", "executor-ray", "trackers")

#: sessions that last longest, and so begin first where several run at a time
LONGEST = ("executor-ray", "backend-fsdp", "backend-megatron", "hybrid-engine", "algo-ppo", "tasks")
#: set for a session whose base environment is made already
BASE_IS_MADE = "NOX_BASE_IS_MADE"

nox.options.sessions = ["isolated"]
nox.options.default_venv_backend = "venv"


def _make_base() -> None:
    """Make the base environment, or bring the core in it up to date."""
    pip = [str(BASE / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if not (BASE / ".complete").exists():
        shutil.rmtree(BASE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(BASE)], check=True)
        torch = ["torch==2.13.0+cpu"] if sys.platform == "linux" else ["torch"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, *torch], check=True)
        subprocess.run([*pip, "-c", str(CONSTRAINTS), f"{ROOT / 'core'}[test]", "hatchling"], check=True)
        (BASE / ".complete").touch()
    else:  # core may have changed; its dependencies are there
        subprocess.run([*pip, "--force-reinstall", "--no-deps", str(ROOT / "core")], check=True)


def _with_dependencies(packages: Iterable[str]) -> list[str]:
    """The packages and those of this repository that they declare, and so on."""
    found: list[str] = []
    waiting = list(packages)
    while waiting:
        if (package := waiting.pop(0)) not in found:
            found.append(package)
            project = nox.project.load_toml(ROOT / "plugins" / package / "pyproject.toml")["project"]
            declared = (re.match(r"drivetrain-([a-z-]+)", entry) for entry in project["dependencies"])
            waiting += [match[1] for match in declared if match and match[1] in PACKAGES]
    return found


@nox.session(python=False)
def isolation(session: nox.Session) -> None:
    """All isolated sessions, as many at a time as there are cores; each one's output comes when it has ended."""
    _make_base()
    environment = {**os.environ, BASE_IS_MADE: "1"}

    def run(package: str) -> bool:
        command = [sys.executable, "-m", "nox", "--session", f"isolated(package='{package}')", "--", *session.posargs]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        return done.returncode == 0

    order = sorted(PACKAGES, key=lambda package: (package not in LONGEST, package))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(run, order))
    if failed := [package for package, fine in zip(order, passed) if not fine]:
        session.error(f"{len(failed)} of {len(order)} failed: {', '.join(failed)}")


@nox.session(venv_params=["--without-pip"])
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Run a plugin's tests with that plugin, core and its declared dependencies alone."""
    if BASE_IS_MADE not in os.environ:
        _make_base()
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    base, site = (str(session.run(python, "-c", script, silent=True, external=True)).strip()
                 for python in (str(BASE / "bin" / "python"), "python"))  # fmt: skip
    (Path(site) / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n", encoding="utf-8")
    _, *others = _with_dependencies((package, *TEST_COMPANIONS.get(package, ())))
    own = f"{package}[test]" if package in TEST_EXTRAS else package
    folders = [str(ROOT / "plugins" / name) for name in (own, *others)]
    session.install("--quiet", "--no-build-isolation", "-c", str(CONSTRAINTS), *folders)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false"}
    files = [f"plugins/{package}/tests/{name}" for name in TEST_FILES.get(package, ("",))]
    session.run("python", "-m", "pytest", *files, *session.posargs, env=env)
