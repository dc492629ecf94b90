"""Training of transformers' causal language models, sharded with FSDP2 and fed with packed sequences."""

__version__ = "0.1.0"
