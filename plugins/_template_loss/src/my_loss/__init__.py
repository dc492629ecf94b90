"""The policy loss my-loss, as a plugin of drivetrain."""
