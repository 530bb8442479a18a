"""One command line on several ranks: rank 0 does the command, the others hold their layers and serve."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

from headrace import config
from headrace.cli import generation, launched
from headrace.cli.parser import BadUsage
from headrace.cli.show import EXIT_ERROR, EXIT_INTERRUPTED, tell
from headrace.errors import Failed, HeadraceError, Lost, Unavailable

TOGETHER = ("run", "speculative", "chat", "batch", "bench")
"""Commands that a model over several ranks can do."""


def run(args: argparse.Namespace, command: ModuleType) -> int:
    """This rank's part of the command; returns its exit status."""
    ranks, left = config.resolve().ranks, config.resolve().left
    if args.command not in TOGETHER:
        raise BadUsage(f"`headrace {args.command}` is for one process and {ranks} were started; leave mpirun out.")
    try:
        from headrace.cluster.mpi import join
    except ImportError as error:
        raise Unavailable(
            f"{ranks} ranks were started and MPI can't be used here ({error}); `pip install 'headrace[mpi]'` on every "
            "machine, with the MPI that started this."
        ) from None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # how a launcher passes Ctrl-C on; the head heeds it
    if left:
        launched.only_left(args, left)
    with join() as link:
        if link.rank == 0:
            args.link = link
            # A launcher passes Ctrl-C on as SIGTERM and kills a moment later: time to end as after Ctrl-C.
            signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
            with launched.told(args) if left else nullcontext():
                link.status = _lead(args, command)
            return link.status
        from headrace.ensemble import serve
        from headrace.options import Choice
        from headrace.plan.sizes import Workload

        # These leave when the head says so, or is gone: an interrupt is for the head alone.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        args.link = link
        choice = Choice(Workload(1, 1, 1), machine=args.machine)  # the head decides for which work
        options = replace(generation.machine_of(args), choice=choice)
        return serve(lambda: generation.find_model(args), options, link, bool(args.trace))


def _lead(args: argparse.Namespace, command: ModuleType) -> int:
    """The command itself; an error is told at once, as leaving may take long when a rank is lost."""
    status, lost = EXIT_ERROR, ""
    try:
        status = int(command.run(args))
        sys.stdout.flush()
    except HeadraceError as error:
        again = args.book is not None and isinstance(error, Lost) and not isinstance(error, Failed)
        lost = str(error) if again else ""
        if not again:
            tell(error)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    launched.over(args, status, lost)
    return status
