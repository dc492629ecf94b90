"""What this distribution offers; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import DispatchModeSpec, hookimpl


@hookimpl
def drivetrain_dispatch_modes() -> Iterable[DispatchModeSpec]:
    for name, mode, summary in (
        ("megatron_compute", "Compute", "Lists by dp index, from the last pipeline stage."),
        ("megatron_compute_proto", "ComputeProto", "Batches in parts by dp index, from the last pipeline stage."),
        ("megatron_pp_as_dp", "PPAsDP", "Lists by dp index and pipeline stage."),
        ("megatron_pp_as_dp_proto", "PPAsDPProto", "Batches in parts by dp index and pipeline stage."),
        ("megatron_pp_only", "PPOnly", "The same arguments to every rank; a result of each pipeline stage."),
    ):
        yield DispatchModeSpec(name=name, summary=summary, factory=f"drivetrain_backend_megatron.dispatch:{mode}")
