"""Policy losses, each a pure function of a micro-batch, as a plugin of drivetrain."""
