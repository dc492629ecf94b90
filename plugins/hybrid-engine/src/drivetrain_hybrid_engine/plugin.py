"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import HybridEngineSpec, WeightTransportSpec, hookimpl


@hookimpl
def drivetrain_hybrid_engines() -> Iterable[HybridEngineSpec]:
    """The hybrid engine ``colocated``."""
    yield HybridEngineSpec(
        name="colocated",
        summary="Training and generation on the same devices: one module in one process, or weights sent in buckets.",
        factory="drivetrain_hybrid_engine.colocated:Colocated",
        config="drivetrain_hybrid_engine.config:ColocatedConfig",
    )


@hookimpl
def drivetrain_weight_transports() -> Iterable[WeightTransportSpec]:
    """Inside a process, and over torch.distributed."""
    yield WeightTransportSpec(
        name="in_process",
        summary="Each process receives what it sends; nothing is copied on the way.",
        factory="drivetrain_hybrid_engine.in_process:InProcess",
        provides=("weight_transport.same_process",),
    )
    yield WeightTransportSpec(
        name="gloo",
        summary="One process broadcasts to the others of its group, through host memory.",
        factory="drivetrain_hybrid_engine.broadcast:GlooBroadcast",
    )
    yield WeightTransportSpec(
        name="nccl",
        summary="One process broadcasts to the others of its group, between NVIDIA GPUs.",
        factory="drivetrain_hybrid_engine.broadcast:NCCLBroadcast",
    )
