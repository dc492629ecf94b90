"""Self-play fine-tuning, as a plugin of drivetrain."""
