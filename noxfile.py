"""One isolated environment a plugin: that plugin, core, and what they declare, nothing else.

Core and its dependencies (torch among them) are installed once, into a base environment that the others look into, so
that a session costs seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    "algo-spin": ("algo-dpo", "backend-fsdp", "rollout-hf"),
    "executor-ray": ("algo-ppo", "backend-fsdp", "hybrid-engine", "rollout-hf"),
    "hybrid-engine": ("backend-fsdp", "rollout-hf"),
    "optimizers": ("backend-fsdp",),
}
#: files of a suite that are enough to show that a plugin stands alone, where the rest of it starts clusters for minutes
TEST_FILES = {"executor-ray": ("test_ray_settings.py", "test_ray_pools.py", "test_ray_program.py")}
#: plugins whose suite needs what their extra `test` brings
TEST_EXTRAS = ("backend-fsdp", "executor-ray", "trackers")

nox.options.sessions = ["isolated"]
nox.options.default_venv_backend = "venv"


def _base() -> Path:
    """Make the base environment, unless it is there; returns its site-packages."""
    python = BASE / "bin" / "python"
    if not (BASE / ".complete").exists():
        shutil.rmtree(BASE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(BASE)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        torch = ["torch==2.13.0+cpu"] if sys.platform == "linux" else ["torch"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, *torch], check=True)
        subprocess.run([*pip, "-c", str(CONSTRAINTS), f"{ROOT / 'core'}[test]", "hatchling"], check=True)
        (BASE / ".complete").touch()
    else:  # core may have changed; its dependencies are there
        command = [str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(ROOT / "core")]
        subprocess.run(command, check=True)
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True).stdout.strip())


@nox.session
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Run a plugin's tests with that plugin, core and its declared dependencies alone."""
    base = _base()
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = str(session.run("python", "-c", script, silent=True)).strip()
    (Path(own) / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n", encoding="utf-8")
    own_extra = f"{package}[test]" if package in TEST_EXTRAS else package
    session.install("--quiet", "-c", str(CONSTRAINTS), *(str(ROOT / "plugins" / name)
                    for name in (own_extra, *TEST_COMPANIONS.get(package, ()))))  # fmt: skip
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false"}
    files = [f"plugins/{package}/tests/{name}" for name in TEST_FILES.get(package, ("",))]
    session.run("python", "-m", "pytest", *files, *session.posargs, env=env)
