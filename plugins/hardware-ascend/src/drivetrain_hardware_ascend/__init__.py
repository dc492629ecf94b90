"""Huawei Ascend NPUs, as a plugin of drivetrain."""
