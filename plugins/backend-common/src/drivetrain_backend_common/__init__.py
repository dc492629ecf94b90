"""What backends compute alike: log-probabilities, objectives, micro-batches, and storages in host memory."""
