"""Rewards for drivetrain by a language model that judges."""
