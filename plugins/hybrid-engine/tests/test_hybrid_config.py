"""Settings that can be refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain.seam.registry import get_registry
from drivetrain_backend_fsdp.config import FSDPConfig
from drivetrain_hybrid_engine import config
from drivetrain_hybrid_engine.config import SENT, SHARED, ColocatedConfig
from drivetrain_hybrid_engine.disaggregated_config import DisaggregatedConfig


def problems(**settings: Any) -> dict[str, tuple[str, str]]:
    """What is wrong with some settings in a run with backend fsdp and rollout hf, by key."""
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(backend=FSDPConfig(lora={})), rollout=SimpleNamespace(name="hf"),
        model=SimpleNamespace(init="pretrained"),
    )  # fmt: skip
    return {p.key: (p.what, p.mend) for p in ColocatedConfig(**settings).check(run, get_registry())}


@pytest.mark.parametrize("sharing", ["auto", "always", "never"])
def test_defaults_fit_the_engines(sharing: str) -> None:
    assert problems(sharing=sharing) == {}


def test_capabilities_follow_from_the_settings() -> None:
    assert ColocatedConfig().required_capabilities() == ()
    assert ColocatedConfig(sharing="always").required_capabilities() == ("backend.live_module", "rollout.live_module")
    assert ColocatedConfig(sharing="never").required_capabilities() == ("backend.weights", "rollout.load_weights")
    assert ColocatedConfig(lora="adapter").required_capabilities() == ("rollout.adapter",)
    assert ColocatedConfig(lora="adapter", sharing="never").required_capabilities()[2:] == ("rollout.adapter",)
    assert DisaggregatedConfig(lora="adapter").required_capabilities() == ("rollout.adapter",)


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc", "folder"])
def test_a_transport_to_another_process_is_refused(transport: str) -> None:
    ((key, (what, mend)),) = problems(transport=transport).items()
    assert key == "transport" and f"{transport!r} is for weights that go to another process" in what
    assert mend == "choose in_process"


def test_an_unknown_transport_is_refused() -> None:
    assert "unknown weight transport 'pigeon'" in problems(transport="pigeon")["transport"][0]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("transport, said", [
    ("in_process", "has both its ends on one process, and with hybrid engine 'disaggregated' actor and rollout have"),
    ("beam", "has both its ends on one device, and with hybrid engine 'disaggregated' actor and rollout are in diff"),
    ("pigeon", "unknown weight transport 'pigeon'"), ("gloo", ""), ("auto", ""),
])  # fmt: skip
def test_transports_between_groups(apart: bool, transport: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = {"actor": "a", "rollout": "b" if apart else "a"}
    run: Any = SimpleNamespace(placement=SimpleNamespace(pool_of=pools.get))
    registry: Any = get_registry()
    find = registry.find

    def with_beam(hook: str, name: str) -> Any:
        beam = SimpleNamespace(problem=None, spec=SimpleNamespace(provides=("weight_transport.same_device",)))
        return beam if name == "beam" else find(hook, name)

    monkeypatch.setattr(registry, "find", with_beam)
    found = list(DisaggregatedConfig(transport=transport).check(run, registry))
    if said and (apart or transport != "beam"):
        assert found[0].key == "transport" and said in found[0].what and found[0].mend
    else:
        assert not found


def test_an_adapter_is_sent_alone_to_a_base_that_can_be_read() -> None:
    assert problems(lora="adapter") == {}
    settings, registry = DisaggregatedConfig(lora="adapter"), get_registry()
    run: Any = SimpleNamespace(model=SimpleNamespace(init="random"), actor=SimpleNamespace(backend=FSDPConfig()))
    found = list(settings.check(run, registry))
    assert [one.key for one in found] == ["lora", "lora"]
    assert "has no adapter" in found[0].what and "is in no folder" in found[1].what
    run.model.init, run.actor.backend = "pretrained", FSDPConfig(lora={})
    assert not list(settings.check(run, registry))


def test_settings_that_would_be_ignored_are_refused() -> None:
    assert problems(sharing="always", lora="adapter").keys() == {"lora"}
    assert problems(sharing="always", bucket_bytes=5, fingerprint="never").keys() == {"bucket_bytes", "fingerprint"}


@pytest.mark.parametrize("capabilities, fits", [(SHARED, True), (SENT, True), (SHARED | SENT, True),
                                                ({"backend.live_module", "rollout.load_weights"}, False)])  # fmt: skip
def test_auto_wants_one_of_two_pairs(capabilities: Any, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "offered", lambda *names: capabilities)
    found = problems()
    assert not found if fits else "backend 'fsdp' and rollout 'hf' have neither two" in found["name"][0]


@pytest.mark.parametrize("settings", [{"bucket_bytes": 0}, {"sharing": "maybe"}, {"fingerprint": True}, {"more": 1}])
def test_wrong_values_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ColocatedConfig(**settings)


def test_offers_and_settings_import_no_torch() -> None:
    modules = "drivetrain_hybrid_engine.plugin, drivetrain_hybrid_engine.disaggregated_config"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
