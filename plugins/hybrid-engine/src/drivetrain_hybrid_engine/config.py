"""The section ``hybrid_engine`` with ``name: colocated``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drivetrain import PluginConfig, Problem

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry

SHARED = frozenset({"backend.live_module", "rollout.live_module"})
"""Capabilities of engines that can be one module."""

SENT = frozenset({"backend.weights", "rollout.load_weights"})
"""Capabilities of engines between which weights can be sent."""

SAME_PROCESS = "weight_transport.same_process"
"""Capability of a transport whose two ends can be in one process."""


class SendingConfig(PluginConfig):
    """What hybrid engines have in common that send weights."""

    bucket_bytes: int = Field(
        512 * 2**20, gt=0, description="Bytes of weights that are gathered and sent together; a larger one goes alone."
    )
    fingerprint: Literal["sampled", "always", "first", "never"] = Field(
        "sampled",
        description="The syncs in which the contents of weights are compared, and not names and shapes alone. sampled:"
        " all at the first and after a sync that failed, then a sixteenth of the names, others each time.",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="What is sent where the trainer trains a low-rank adapter: all weights with it merged into them, or"
        " the adapter alone, to a rollout that has the weights of the model's folder and computes with both.",
    )

    def required_capabilities(self) -> tuple[str, ...]:
        return ("rollout.adapter",) if self.lora == "adapter" else ()

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.lora == "merged":
            return
        backend = run.actor.backend
        offers = {*registry.select("backends", backend.name).spec.provides, *backend.provided_capabilities()}
        if "backend.adapter" not in offers:
            yield Problem(key="lora", what="the actor has no adapter that could be sent alone",
                          mend="set actor.backend.lora, or this to merged")  # fmt: skip
        if run.model.init == "random":
            yield Problem(key="lora", what="the base of the adapter is drawn by this run and is in no folder, where the"
                          " rollout could read it", mend="set it to merged, or model.init=pretrained")  # fmt: skip


class ColocatedConfig(SendingConfig):
    """How the two engines of a process get to the same weights."""

    name: str = Field("colocated", description="Name of the plugin.")
    sharing: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Generate with the trainer's own module, so that nothing moves. auto: where both engines can, and"
        " the trainer is one process.",
    )
    transport: str = Field("in_process", description="Weight transport by name; both its ends are in one process.")

    def required_capabilities(self) -> tuple[str, ...]:
        needs: dict[str, frozenset[str]] = {"always": SHARED, "never": SENT}
        return (*sorted(needs.get(self.sharing, ())), *super().required_capabilities())

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        found = registry.find("weight_transports", self.transport)
        if found.problem:
            yield Problem(key="transport", what=found.problem.what, mend=found.problem.mend)
        elif SAME_PROCESS not in found.spec.provides:
            fit = [spec.name for spec in registry.specs("weight_transports") if SAME_PROCESS in spec.provides]
            yield Problem(
                key="transport", mend=f"choose {' or '.join(fit)}",
                what=f"weight transport {self.transport!r} is for weights that go to another process; with hybrid "
                     "engine 'colocated' each process has both engines",
            )  # fmt: skip
        if self.sharing == "always":
            for key in ("transport", "bucket_bytes", "fingerprint", "lora"):
                if self.departs(key):
                    yield Problem(key=key, what=f"nothing is sent with sharing: always, so {key} would be ignored",
                                  mend=f"remove {key}")  # fmt: skip
        if self.sharing == "auto" and run.rollout is not None:
            backend, rollout = run.actor.backend.name, run.rollout.name
            if not any(pair <= offered(registry, backend, rollout) for pair in (SHARED, SENT)):
                yield Problem(
                    key="name", mend="choose another backend or rollout",
                    what=f"hybrid engine 'colocated' needs {' and '.join(sorted(SHARED))}, or "
                         f"{' and '.join(sorted(SENT))}; backend {backend!r} and rollout {rollout!r} have neither two",
                )  # fmt: skip


def offered(registry: Registry, backend: str, rollout: str) -> frozenset[str]:
    """The capabilities of a backend and a rollout, by their names."""
    chosen = (("backends", backend), ("rollouts", rollout))
    return frozenset(capability for hook, name in chosen for capability in registry.select(hook, name).spec.provides)
