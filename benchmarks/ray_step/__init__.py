"""A step of PPO on Ray whose workers compute nothing."""
