"""The memory budget: hard, counts everything, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import OverBudget


def human(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3f} GiB"


@dataclass
class Budget:
    """A ledger over one tier's bytes. limit None: nothing is refused, everything is still counted."""

    limit: int | None = None
    items: dict[str, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return sum(self.items.values())

    @property
    def left(self) -> int | None:
        return None if self.limit is None else self.limit - self.used

    def take(self, name: str, nbytes: int, remedy: str = "") -> None:
        """Count ``nbytes`` under ``name``; OverBudget, with the whole ledger and ``remedy``, when it doesn't fit."""
        self.items[name] = self.items.get(name, 0) + nbytes
        if self.limit is not None and self.used > self.limit:
            lines = ", ".join(f"{key} {human(size)}" for key, size in self.items.items())
            needs = f"This needs {human(self.used)} of memory and the budget is {human(self.limit)} ({lines})"
            raise OverBudget(f"{needs}; {remedy}." if remedy else f"{needs}.")

    def give_back(self, name: str) -> None:
        self.items.pop(name, None)
