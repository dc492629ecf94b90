"""Proximal policy optimization, as a plugin of drivetrain."""
