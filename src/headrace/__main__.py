"""``headrace`` and ``python -m headrace``: as little as possible until Ctrl-C is taken care of."""

from __future__ import annotations

import io
import os
import signal
import sys


def start() -> int:
    """Run the command line. Until it has begun, and once it is done, Ctrl-C ends the process without a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us; the next file opened would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that can't show a character isn't a reason to stop
            stream.reconfigure(errors="backslashreplace")
    wanted = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if wanted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.cli.main import main
    from headrace.cli.show import EXIT_INTERRUPTED

    try:
        if wanted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
        if wanted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(start())
