"""The estimator ``grpo``."""

from __future__ import annotations

from drivetrain.testing import AdvantageConformance


class TestGRPOAdvantage(AdvantageConformance):
    name = "grpo"


class TestWithoutStd(AdvantageConformance):
    name = "grpo"
    options = {"normalize_by_std": False}
