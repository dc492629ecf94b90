"""Datasets and rewards for drivetrain."""
