"""minillm: LLM inference, built to be read."""

__version__ = "0.2.0"
