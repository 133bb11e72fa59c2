"""The version of the package. No other file states it."""

__version__ = "0.1.0"
