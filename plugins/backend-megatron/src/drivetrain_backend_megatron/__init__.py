"""The backend ``megatron`` and Megatron's dispatch modes, as a plugin of drivetrain."""
