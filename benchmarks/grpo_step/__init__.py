"""One GRPO step on a small model, taken by several programs that wait for one another."""
