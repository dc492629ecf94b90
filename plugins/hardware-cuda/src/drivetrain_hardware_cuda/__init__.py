"""NVIDIA GPUs, as a plugin of drivetrain."""
