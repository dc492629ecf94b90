"""The advantage estimator my-advantage, as a plugin of drivetrain."""
