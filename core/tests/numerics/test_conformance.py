"""Core's own estimator and terms satisfy what is asked of everybody's."""

from __future__ import annotations

from drivetrain.testing import AdvantageConformance, LossConformance


class TestGAE(AdvantageConformance):
    name = "gae"
    options = {"gamma": 0.99, "lam": 0.9}
    equal_rewards_give_zero = False  # values differ


class TestClip(LossConformance):
    name = "clip"
    options = {"clip_low": 0.05, "clip_high": 0.05, "clip_dual": 3.0}


class TestClipBySequence(LossConformance):
    name = "clip"
    options = {"aggregation": "seq-mean-token-mean"}


class TestPolicyGradient(LossConformance):
    name = "policy_gradient"


class TestKL(LossConformance):
    name = "kl"
    options = {"kind": "k2"}


class TestEntropy(LossConformance):
    name = "entropy"


class TestValueClip(LossConformance):
    name = "value_clip"
    options = {"clip_range": 0.3}
