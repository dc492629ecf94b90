"""Direct preference optimization, offline and online, as a plugin of drivetrain."""
