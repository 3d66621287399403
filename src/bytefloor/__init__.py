"""bytefloor: quantised language models, measured against the floor their bytes set."""

__version__ = "0.1.0"
