"""Training and generation on the same devices, and the ways that weights take between them."""

__version__ = "0.1.0"
