"""Nobody but the plugins that are about a vendor's devices asks the vendor's module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: a vendor's words, and the packages that may say them: the hardware plugins, and engines that run on CUDA alone
VENDORS = {
    r"torch\.cuda|torch\.version\.cuda|nvidia|nvml": {
        "plugins/hardware-cuda", "plugins/hardware-rocm", "plugins/backend-megatron", "plugins/rollout-vllm",
    },
    r"torch\.version\.hip|\brocm\b": {"plugins/hardware-rocm", "plugins/hardware-cuda"},
    r"torch\.npu|torch_npu|\bhccl\b": {"plugins/hardware-ascend"},
}  # fmt: skip
#: where a vendor's device is named and none is asked
NAMED = {"core/src/drivetrain/seam/first_party.py"}


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


@pytest.mark.parametrize(("words", "home"), [(words, home) for words, homes in VENDORS.items() for home in homes
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
