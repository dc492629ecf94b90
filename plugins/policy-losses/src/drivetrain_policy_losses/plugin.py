"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import PolicyLossSpec, hookimpl

CLIP, REDUCE = ("clip_low", "clip_high"), ("aggregation", "scale")


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="gspo",
        summary="Clipped ratio of the whole sequence, its length taken out.",
        factory="drivetrain_policy_losses.sequence_ratio:gspo",
        scope="sequence",
        options=CLIP,
        weighted=True,
    )
    yield PolicyLossSpec(
        name="gmpo",
        summary="Geometric mean of the clipped ratios of a sequence.",
        factory="drivetrain_policy_losses.sequence_ratio:gmpo",
        scope="sequence",
        options=CLIP,
        weighted=True,
    )
    yield PolicyLossSpec(
        name="cispo",
        summary="Policy gradient weighted by the clipped ratio, so that no token loses its gradient.",
        factory="drivetrain_policy_losses.soft_clipping:cispo",
        scope="token",
        options=(*CLIP, *REDUCE),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="sapo",
        summary="A smooth gate of the ratio in place of clipping.",
        factory="drivetrain_policy_losses.soft_clipping:sapo",
        scope="token",
        options=("tau_pos", "tau_neg", *REDUCE),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="gpg",
        summary="Policy gradient without a ratio.",
        factory="drivetrain.numerics:policy_gradient",
        scope="token",
        options=REDUCE,
        weighted=True,
    )
    yield PolicyLossSpec(
        name="clip_cov",
        summary="Clipped ratio; some tokens of high covariance give no gradient.",
        factory="drivetrain_policy_losses.covariance:clip_cov",
        scope="batch",
        options=(*CLIP, "cov_fraction", "cov_low", "cov_high", *REDUCE),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="kl_cov",
        summary="Unclipped ratio; tokens of the highest covariance pay for leaving the old policy.",
        factory="drivetrain_policy_losses.covariance:kl_cov",
        scope="batch",
        options=("cov_fraction", "cov_kl_coef", *REDUCE),
        weighted=True,
    )
    yield PolicyLossSpec(
        name="dro",
        summary="Policy gradient with a quadratic penalty on the log-ratio.",
        factory="drivetrain_policy_losses.quadratic:dro",
        scope="sequence",
        options=("beta", "level", *REDUCE),
        weighted=True,
    )
