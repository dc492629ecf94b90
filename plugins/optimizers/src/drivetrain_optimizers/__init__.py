"""Optimizers for drivetrain that need a library of their own."""
