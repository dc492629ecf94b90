"""Trackers that write a run's metrics and samples for other programs: files, and the clients of tracking services."""
