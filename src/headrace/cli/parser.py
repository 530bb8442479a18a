"""An argument parser whose errors are one line with a remedy, and the types of our arguments."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from headrace.errors import HeadraceError


class BadUsage(HeadraceError):
    """A command line we can't read."""


class Parser(argparse.ArgumentParser):
    """No abbreviated flags (they would change meaning as flags are added); errors are raised, not printed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += self._suggestion(message.split()[2])
        elif found := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1)
            message = f"there is no command {found[1]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        raise BadUsage(f"{message.rstrip('.')} (see `{self.prog} --help`).")

    def _suggestion(self, flag: str) -> str:
        near = difflib.get_close_matches(flag.split("=")[0], self.flags(), 1, 0.7)
        return f"; did you mean {near[0]}?" if near else ""

    def flags(self) -> list[str]:
        """Every flag of this parser and of its commands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    found += sub.flags()
        return found


class _Help(argparse.HelpFormatter):
    """Paragraphs of a description stay apart, and flags get room before their help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """The flags are explained below, so the usage line is what one types around them."""
        rest = [self._format_args(a, a.metavar or a.dest) for a in actions if not a.option_strings]
        start = "%(prog)s [OPTIONS]" if len(rest) < len(actions) else "%(prog)s"
        super().add_usage(usage or " ".join([start, *rest]), actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Help, self)._fill_text(p, width, indent) for p in text.split("\n\n"))


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An integer from ``low`` to ``high``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < low or (high is not None and value > high):
            limits = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {limits}")
        return value

    return read


def real(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A finite number from ``low`` (with ``above``: over it) to ``high``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not math.isfinite(value) or value < low or value > high or (above and value == low):
            limits = "a finite number" if math.isinf(low) else f"over {low:g}" if above else f"{low:g} or more"
            limits += f" and at most {high:g}" if math.isfinite(high) else ""
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {limits}")
        return value

    return read


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Bytes: ``1500000``, ``800M``, ``2G``, ``1.5GiB``. K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None or (value := int(float(found[1]) * _UNITS[found[2]])) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with K, M, G or T, like 1.5G")
    return value


def kv_bits(text: str) -> tuple[int, int]:
    """(K bits, V bits) of the cache, written ``16/16``, ``8/8``, ``8/4`` or ``4/4``; one number stands for both."""
    found = re.fullmatch(r"(16|8|4)(?:/(16|8|4))?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no pair of cache widths; write K/V with each 16, 8 or 4, like 8/4"
        )
    return int(found[1]), int(found[2] or found[1])


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers over 0, separated by commas."""
    return tuple(whole(1)(part) for part in text.split(","))


def thread_counts(text: str) -> tuple[int, ...]:
    """Threads of each rank, separated by commas, or one number for all."""
    return tuple(whole(1, 1024)(part) for part in text.split(","))
