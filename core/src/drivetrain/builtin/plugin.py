"""What core itself offers, through the same hooks as everybody else."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.seam.hookspecs import hookimpl
from drivetrain.seam.specs import (
    AdvantageEstimatorSpec,
    DatasetSpec,
    DispatchModeSpec,
    ExecutorSpec,
    HardwareSpec,
    HybridEngineSpec,
    PolicyLossSpec,
    RewardSpec,
    TrackerSpec,
)


@hookimpl
def drivetrain_advantage_estimators() -> Iterable[AdvantageEstimatorSpec]:
    yield AdvantageEstimatorSpec(
        name="gae",
        summary="Generalized advantage estimation, whitened over the mask.",
        factory="drivetrain.numerics:gae_advantage",
        scope="batch",
        options=("gamma", "lam"),
        needs=("values",),
    )


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="clip",
        summary="Clipped probability ratio with separate bounds and dual clip.",
        factory="drivetrain.numerics:clip",
        scope="token",
        options=("clip_low", "clip_high", "clip_dual", "aggregation", "scale"),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="policy_gradient",
        summary="Advantage times log-probability: REINFORCE.",
        factory="drivetrain.numerics:policy_gradient",
        scope="token",
        options=("aggregation", "scale"),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="kl",
        summary="KL divergence from the reference policy.",
        factory="drivetrain.numerics:kl_to_ref",
        scope="token",
        options=("kind", "aggregation", "scale"),
    )
    yield PolicyLossSpec(
        name="entropy",
        summary="Entropy bonus: the negative of the policy's entropy.",
        factory="drivetrain.numerics:entropy_bonus",
        scope="token",
        options=("aggregation", "scale"),
        needs=("entropy",),
    )
    yield PolicyLossSpec(
        name="value_clip",
        summary="Clipped squared error of a critic.",
        factory="drivetrain.numerics:value_clip",
        scope="token",
        options=("clip_range", "aggregation", "scale"),
        needs=("values",),
    )


@hookimpl
def drivetrain_hybrid_engines() -> Iterable[HybridEngineSpec]:
    yield HybridEngineSpec(
        name="shared",
        summary="Training and generation are one module in one process; nothing moves.",
        factory="drivetrain.builtin.shared_hybrid:SharedWeights",
        requires=("backend.live_module", "rollout.live_module"),
    )


@hookimpl
def drivetrain_dispatch_modes() -> Iterable[DispatchModeSpec]:
    for name, target, summary in (
        ("one_to_all", "dispatch:OneToAll", "The same arguments to every rank."),
        ("rank_zero", "dispatch:RankZero", "All arguments to rank 0 alone."),
        ("all_to_all", "dispatch:AllToAll", "Lists with one element for each rank."),
        ("dp_compute", "dispatch:DPCompute", "Lists with one element for each data-parallel index."),
        ("dp_compute_proto", "row_dispatch:DPComputeProto", "Batches in balanced parts, padded; results joined."),
        ("dp_compute_proto_with_func", "row_dispatch:DPComputeProtoWithFunc", "Likewise, after a function for all."),
        ("dp_compute_metric", "row_dispatch:DPComputeMetric", "Batches in balanced parts, unpadded; metrics merged."),
    ):
        yield DispatchModeSpec(name=name, summary=summary, factory=f"drivetrain.builtin.{target}")


@hookimpl
def drivetrain_executors() -> Iterable[ExecutorSpec]:
    yield ExecutorSpec(
        name="local",
        summary="Every worker in this process.",
        factory="drivetrain.builtin.local_executor:LocalExecutor",
    )


@hookimpl
def drivetrain_hardware() -> Iterable[HardwareSpec]:
    yield HardwareSpec(
        name="cpu", summary="The host's processor, over gloo.", factory="drivetrain.builtin.cpu:CPU", fallback=True
    )
    yield HardwareSpec(
        name="auto",
        summary="The one accelerator that is there, or else the CPU.",
        factory="drivetrain.builtin.auto_hardware:detect",
    )


@hookimpl
def drivetrain_datasets() -> Iterable[DatasetSpec]:
    yield DatasetSpec(
        name="jsonl",
        summary="Prompts from a file of JSON lines.",
        factory="drivetrain.builtin.jsonl:JsonlDataset",
        config="drivetrain.builtin.configs:JsonlConfig",
    )


@hookimpl
def drivetrain_rewards() -> Iterable[RewardSpec]:
    yield RewardSpec(
        name="exact_match",
        summary="One for a response that equals the answer.",
        factory="drivetrain.builtin.exact_match:ExactMatch",
        config="drivetrain.builtin.configs:ExactMatchConfig",
    )
    yield RewardSpec(
        name="function",
        summary="A function of yours, by module or file.",
        factory="drivetrain.builtin.function_reward:FunctionReward",
        config="drivetrain.builtin.configs:FunctionRewardConfig",
    )


@hookimpl
def drivetrain_trackers() -> Iterable[TrackerSpec]:
    yield TrackerSpec(
        name="jsonl",
        summary="Writes metrics.jsonl and samples.jsonl into the run folder.",
        factory="drivetrain.builtin.trackers:JSONLTracker",
    )
    yield TrackerSpec(
        name="lines", summary="Prints a line a logged step.", factory="drivetrain.builtin.trackers:LinesTracker"
    )
