"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import HybridEngineSpec, WeightTransportSpec, hookimpl


@hookimpl
def drivetrain_hybrid_engines() -> Iterable[HybridEngineSpec]:
    """The hybrid engines ``colocated`` and ``disaggregated``."""
    yield HybridEngineSpec(
        name="colocated",
        summary="Training and generation on the same devices: one module in one process, or weights sent in buckets.",
        factory="drivetrain_hybrid_engine.colocated:Colocated",
        config="drivetrain_hybrid_engine.config:ColocatedConfig",
    )
    yield HybridEngineSpec(
        name="disaggregated",
        summary="Training and generation in worker groups of their own, with weights sent from one to the other.",
        factory="drivetrain_hybrid_engine.disaggregated:Disaggregated",
        config="drivetrain_hybrid_engine.disaggregated_config:DisaggregatedConfig",
        provides=("hybrid_engine.two_groups",),
        requires=("backend.weights", "rollout.load_weights", "executor.placement"),
    )


@hookimpl
def drivetrain_weight_transports() -> Iterable[WeightTransportSpec]:
    """Inside a process, between those of a node, over torch.distributed, and through files."""
    yield WeightTransportSpec(
        name="in_process",
        summary="Each process receives what it sends; nothing is copied on the way.",
        factory="drivetrain_hybrid_engine.in_process:InProcess",
        provides=("weight_transport.same_process",),
    )
    yield WeightTransportSpec(
        name="gloo",
        summary="One process broadcasts to the others of a meeting, through host memory.",
        factory="drivetrain_hybrid_engine.broadcast:GlooBroadcast",
    )
    yield WeightTransportSpec(
        name="nccl",
        summary="One process broadcasts to the others of a meeting, between devices, by NCCL.",
        factory="drivetrain_hybrid_engine.broadcast:NCCLBroadcast",
    )
    yield WeightTransportSpec(
        name="ipc",
        summary="Processes of one node see the sender's buffers; on a GPU nothing goes through the host.",
        factory="drivetrain_hybrid_engine.ipc:IPC",
        provides=("weight_transport.same_device",),
    )
    yield WeightTransportSpec(
        name="folder",
        summary="Buckets are files in a folder that sender and receivers share.",
        factory="drivetrain_hybrid_engine.folder:Folder",
    )
