"""Generation with transformers' own models, also with the module that is being trained."""

__version__ = "0.1.0"
