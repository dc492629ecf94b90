"""The rollout ``vllm``: generation with vLLM inside the worker's process."""

__version__ = "0.1.0"
