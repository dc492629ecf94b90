"""Advantage estimators without a critic, as a plugin of drivetrain."""
