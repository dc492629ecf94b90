"""AMD GPUs, as a plugin of drivetrain."""
