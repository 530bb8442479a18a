"""From what a person calls a model to its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import Config
from headrace.errors import BadFile
from headrace.store import known

if TYPE_CHECKING:
    from headrace.store.transfer import Progress


def here(text: str | None, config: Config) -> Path | None:
    """As ``find``, but only what is on this machine: None for what would have to be fetched, or isn't."""
    if text is None or (text in known.KNOWN and not Path(text).exists()):
        return known.cached(known.KNOWN[text] if text else known.DEMO, config.cache)
    if text.startswith("hf:"):
        from headrace.store import hub

        return hub.cached(hub.parse(text), config)
    return path if (path := Path(text)).exists() else None


def find(text: str | None, config: Config, note: Callable[[str], None], progress: Progress) -> Path:
    """The path of a model file or folder, fetched first when it has to be.

    text: a path, a known model's name, ``hf:ORG/REPO[:FILE]``, or None for the demo model. A path that exists wins.
    """
    if text is None:
        return known.fetch(known.DEMO, config.cache, note)
    if text.startswith("hf:"):
        from headrace.store import hub  # HTTP and TLS: 10 MB that a model on this disk doesn't need

        name = hub.parse(text)
        return hub.cached(name, config) or hub.pull(name, config, progress, note)
    path = Path(text)
    if text in known.KNOWN and not path.exists():
        return known.fetch(known.KNOWN[text], config.cache, note)
    if not path.exists() and not path.is_symlink():
        raise BadFile(
            f"{text}: there is no such file or folder. Models known by name are {', '.join(known.KNOWN)}; "
            "hf:ORG/REPO names one on a hub."
        )
    return path
