"""A text of our own to measure models with, where a user gives none: plain English of a few hundred tokens."""

from importlib.resources import files

TEXT = files("headrace.text").joinpath("prose.txt").read_text("utf-8")
