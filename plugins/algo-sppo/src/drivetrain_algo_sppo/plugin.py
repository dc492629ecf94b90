"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, PolicyLossSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="sppo",
        summary="Self-play preference optimization: fit log-ratios to the win rates against the last policy.",
        factory="drivetrain_algo_sppo.algorithm:SPPO",
        config="drivetrain_algo_sppo.config:SPPOConfig",
        requires=("backend.train", "backend.log_probs"),
    )


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="sppo",
        summary="Square of a response's log-ratio less eta times its win probability above one half.",
        factory="drivetrain_algo_sppo.loss:sppo",
        scope="sequence",
        options=("eta",),
    )
