"""A vendor's module is asked by the plugins about its devices alone, and what needs CUDA is refused elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: a vendor's words, and the packages that may say them: the hardware plugins, and engines that run on CUDA alone
VENDORS = {
    r"torch\.cuda|torch\.version\.cuda|nvidia|nvml": {
        "plugins/hardware-cuda", "plugins/hardware-rocm",
    },
    r"torch\.version\.hip|\brocm\b": {"plugins/hardware-rocm", "plugins/hardware-cuda"},
    r"torch\.npu|torch_npu|\bhccl\b": {"plugins/hardware-ascend"},
}  # fmt: skip
#: where a vendor's device is named and none is asked
NAMED = {"core/src/drivetrain/seam/first_party.py",
         "plugins/backend-megatron/src/drivetrain_backend_megatron/cpu.py"}  # fmt: skip


def sources() -> list[Path]:
    packages = [ROOT / "core", *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
    return [path for package in packages for path in sorted((package / "src").rglob("*.py"))]


@pytest.mark.parametrize("words", VENDORS)
def test_a_vendors_module_stands_in_the_plugins_about_it_alone(words: str) -> None:
    found = {}
    for path in sources():
        text, name = path.read_text(), path.relative_to(ROOT)
        package = str(Path(*name.parts[: 1 if name.parts[0] == "core" else 2]))
        if str(name) not in NAMED and package not in VENDORS[words] and (hit := re.search(words, text, re.IGNORECASE)):
            found[str(name)] = hit[0]
    assert not found


@pytest.mark.parametrize(("words", "home"), [(words, home) for words, homes in VENDORS.items() for home in sorted(homes)
                                             if home.startswith("plugins/hardware")])  # fmt: skip
def test_the_search_finds_what_it_looks_for(words: str, home: str) -> None:
    texts = [path.read_text() for path in (ROOT / home / "src").rglob("*.py")]
    assert any(re.search(words, text, re.IGNORECASE) for text in texts)


def test_the_exceptions_are_needed() -> None:
    """An engine that is excepted and does not ask the module needs no exception."""
    words = next(iter(VENDORS))
    for package in VENDORS[words]:
        texts = [path.read_text() for path in (ROOT / package / "src").rglob("*.py")]
        assert not texts or any(re.search(words, text, re.IGNORECASE) for text in texts), package


PLUGIN = """
from drivetrain import BackendSpec, hookimpl

@hookimpl
def drivetrain_backends():
    yield BackendSpec(name="kernels", summary="Kernels for CUDA.", factory="none:none", requires=("hardware.cuda",),
                      provides=("backend.train", "backend.log_probs", "backend.live_module"))
"""
CONFIG = """
model: {path: model}
algorithm: {name: sft}
actor: {backend: {name: kernels}, optimizer: {name: adamw, lr: 1.0e-3}}
data: {batch_prompts: 4, train: {name: jsonl, path: train.jsonl}}
trainer: {steps: 1}
"""
PROBE = """
import sys
from drivetrain.cli.main import run
code = run(["config", sys.argv[1], f"hardware.name={sys.argv[2]}"])
print(not {"torch", "ray", "transformers"} & set(sys.modules))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def refusal(tmp_path_factory: pytest.TempPathFactory):
    """What ``drivetrain config`` says of a backend that requires CUDA, on a hardware."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (site / "acme_kernels.py").write_text(PLUGIN)
    (site / "run.yaml").write_text(CONFIG)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain]\nkernels = acme_kernels\n")

    def ask(hardware: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", PROBE, str(site / "run.yaml"), hardware]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(arguments, capture_output=True, text=True, env=environment)

    return ask


@pytest.mark.parametrize("hardware", ["rocm", "ascend", "cpu", "auto"])
def test_a_backend_for_cuda_is_refused_elsewhere_before_anything_is_imported(refusal, hardware: str) -> None:
    done = refusal(hardware)
    assert done.returncode == 2
    assert f"backend 'kernels' needs hardware.cuda, which hardware '{hardware}' does not provide" in done.stderr
    assert "choose another hardware (cuda) or backend" in done.stderr
    assert done.stdout.splitlines()[-1] == "True"


def test_a_backend_for_cuda_goes_with_cuda(refusal) -> None:
    done = refusal("cuda")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
