"""Rank 0 under ``headrace launch``: its output, what is committed and signs of life go to the launcher as lines."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.cluster import journal
from headrace.cluster.journal import Book, Journal, Out

EVERY = 2.0
"""Seconds between signs of life."""


def only_left(args: argparse.Namespace, left: tuple[int, ...]) -> None:
    """What was given for each rank is for those that are left; shares of layers are for all of them or none."""
    for name in ("threads", "threads_batch"):
        given = getattr(args, name, None) or ()
        if len(given) > max(left, default=len(given)) and len(given) > 1:
            setattr(args, name, tuple(given[i] for i in left))
    if left != tuple(range(len(left))):
        args.layer_split = None


@contextmanager
def told(args: argparse.Namespace) -> Iterator[None]:
    """While the command runs. What an earlier start had committed comes first on standard input."""
    out, before = Out(os.dup(sys.stdout.fileno())), Journal()
    source = journal.In(os.dup(sys.stdin.fileno()), out.say)
    while (said := source.take()).kind == journal.JOURNAL:
        before.hear(said.data)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(source), encoding="utf-8")
    args.book = Book(out.say, before)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(out), encoding="utf-8")
    # mpirun carries this one to the ranks; on Ctrl-C of its own it would end them.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    done = threading.Event()

    def live() -> None:
        kind = journal.BEGUN
        while not done.is_set():
            out.say(kind)
            kind = journal.ALIVE
            done.wait(EVERY)

    threading.Thread(target=live, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def over(args: argparse.Namespace, status: int, lost: str = "") -> None:
    """Tell a launcher, where there is one, how the command ended. lost: why it should be started again."""
    if args.book is not None:
        args.book.say(journal.END, bytes([status]) + " ".join(lost.split()).encode())
