"""On-policy learning with the optimal reward baseline, as a plugin of drivetrain."""
