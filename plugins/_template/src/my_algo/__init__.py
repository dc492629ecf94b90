"""The algorithm my-algo, as a plugin of drivetrain."""
