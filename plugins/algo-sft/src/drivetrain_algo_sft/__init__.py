"""Supervised fine-tuning, as a plugin of drivetrain."""
