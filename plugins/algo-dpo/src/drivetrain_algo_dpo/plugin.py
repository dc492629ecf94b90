"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, PolicyLossSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="dpo",
        summary="Direct preference optimization: learn from pairs of responses in a dataset.",
        factory="drivetrain_algo_dpo.algorithm:DPO",
        config="drivetrain_algo_dpo.config:DPOConfig",
        requires=("backend.train", "backend.log_probs"),
        rewards=False,
        generates=False,
    )
    yield AlgorithmSpec(
        name="online_dpo",
        summary="Online DPO: the best and the worst of a prompt's samples form the pair.",
        factory="drivetrain_algo_dpo.algorithm:OnlineDPO",
        config="drivetrain_algo_dpo.config:OnlineDPOConfig",
        requires=("backend.train", "backend.log_probs"),
    )


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="dpo",
        summary="Logistic, squared or hinge loss of the margin between the log-ratios of a pair.",
        factory="drivetrain_algo_dpo.loss:dpo",
        scope="group",
        options=("beta", "kind", "label_smoothing"),
    )
