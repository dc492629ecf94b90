"""Tests that a plugin's author subclasses: override what names the thing under test, and pytest runs the rest."""

from drivetrain.testing.advantages import AdvantageConformance
from drivetrain.testing.devices import HardwareConformance, SimulatedDevices
from drivetrain.testing.losses import LossConformance

__all__ = ["AdvantageConformance", "HardwareConformance", "LossConformance", "SimulatedDevices"]
