"""The one exception tree. Every error a user can cause is a ``HeadraceError`` with a remedy in its text."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of everything this package raises on purpose. The command line prints it and exits with 2."""


class BadFile(HeadraceError):
    """A model, prompt or job file is missing, truncated, hostile or of an unknown kind."""


class Unsupported(HeadraceError):
    """A known thing we refuse: an architecture, tensor type, config value or flag, named in the message."""


class BadRequest(HeadraceError):
    """A request that can't be honoured: empty prompt, prompt over the context, bad sampling parameter."""


class OverBudget(HeadraceError):
    """A plan that doesn't fit; the message carries the numbers and what would fit."""


class BadMessage(HeadraceError):
    """Bytes from a peer that are no valid message, or a message of another version, model or epoch."""


class Unavailable(HeadraceError):
    """Something outside the program is missing: the network, room on the disk, a package, a permission."""


class Lost(HeadraceError):
    """A rank of the cluster failed, was killed or stopped, or can't be reached; the message names it and its host."""


class Failed(Lost):
    """A rank that says itself why it can't go on; started again it would say the same."""
