"""Group relative policy optimization, as a plugin of drivetrain."""
