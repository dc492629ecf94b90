"""Decoupled clip and dynamic sampling policy optimization, as a plugin of drivetrain."""
