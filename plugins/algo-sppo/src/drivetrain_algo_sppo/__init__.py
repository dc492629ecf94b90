"""Self-play preference optimization, as a plugin of drivetrain."""
