"""Headrace runs large language models bigger than the machine in front of you."""

__version__ = "0.1.0"
