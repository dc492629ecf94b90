"""Megatron's dispatch modes, as cases of core's mesh mode."""

from __future__ import annotations

from drivetrain import DPCompute, DPComputeProto, MeshMode


class Compute(DPCompute):
    """Lists with one element for each dp index, to all its ranks; results from tp 0, cp 0, the last pp."""


class ComputeProto(DPComputeProto):
    """Batches in parts by dp index, each to all its ranks; results from tp 0, cp 0, the last pp are joined."""


class PPAsDP(DPCompute):
    """Lists with one element for each (dp, pp), pp fastest, to all its ranks; results from tp 0, cp 0."""

    split_axes = collect_axes = ("dp", "pp")


class PPAsDPProto(DPComputeProto):
    """Batches in parts by (dp, pp), pp fastest, each to all its ranks; results from tp 0, cp 0 are joined."""

    split_axes = collect_axes = ("dp", "pp")


class PPOnly(MeshMode):
    """The same arguments to every rank; a list of the results of each pp, from dp 0, tp 0, cp 0."""

    split_axes = ()
    collect_axes = ("pp",)
