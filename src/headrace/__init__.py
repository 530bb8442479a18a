"""Headrace runs large language models bigger than the machine in front of you.

``headrace.load`` is the way in; see ``headrace.engine``. Names are imported when first used, so that importing the
package, as every command does, costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.engine import Completion, Engine, Figures, Options, Piece, Sampling, load

__version__ = "0.1.0"

_ENGINE = ("Completion", "Engine", "Figures", "Options", "Piece", "Sampling", "load")
__all__ = ["Completion", "Engine", "Figures", "HeadraceError", "Options", "Piece", "Sampling", "load"]


def __getattr__(name: str) -> Any:
    if name not in _ENGINE:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from headrace import engine

    return getattr(engine, name)
