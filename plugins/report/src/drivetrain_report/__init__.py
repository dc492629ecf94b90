"""What a run of drivetrain looks like: a live console view, and a page about it when it is over."""
