"""The command ``headrace``: finds the command asked for, imports only that, and turns errors into one line."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from headrace import __version__, config
from headrace.cli.parser import BadUsage, Parser
from headrace.cli.show import EXIT_ERROR, EXIT_INTERRUPTED, tell
from headrace.errors import HeadraceError

COMMANDS = {
    "run": "continue or answer one prompt",
    "speculative": "run, for command lines of PipeInfer's program",
    "flexgen": "run, for command lines of FlexGen's benchmark",
    "launch": "run, chat, batch or bench over several machines, and go on when one is lost",
    "chat": "talk with a model, turn by turn",
    "batch": "compute every row of an OpenAI batch file, resumable",
    "bench": "measure prefill and decode at several lengths and row counts",
    "simulate": "predict what a cluster would do with a model",
    "plan": "say what a model would do under a limit, before it is loaded or fetched",
    "pack": "make the file that a model's layers stream from, ahead",
    "inspect": "tell what a model file is made of, without loading it",
    "check": "tell what this machine offers and what is missing",
    "pull": "fetch a model from a Hugging Face hub, resumable and checked",
    "cache": "list or remove fetched models",
}
"""Command -> one line of help. Each is the module ``headrace.cli.<command>`` with ``add`` and ``run``."""

NO_MEMORY = "The memory isn't enough for this; give --ram to have it counted first, or ask for less at a time."
DESCRIPTION = "Runs large language models bigger than the machine in front of you."


def module(command: str) -> ModuleType:
    """A command's module: ``add(parser)`` declares its arguments, ``run(args)`` does it and returns the exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(f"headrace.cli.{command}")
    # A KeyboardInterrupt in the midst of NumPy's import becomes an ImportError; there is nothing to tidy up yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(f"headrace.cli.{command}")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """The parser of the whole command line, with the arguments of ``commands`` (importing just those)."""
    top = Parser(
        prog="headrace", description=DESCRIPTION, epilog="`headrace COMMAND --help` tells more about a command."
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    top.set_defaults(link=None, trace=None, book=None)  # link, book: this rank's place among several (cli/ranks.py)
    group = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, line in COMMANDS.items():
        sub = group.add_parser(name, help=line)
        if name in commands:
            module(name).add(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status: 0, 2 for any error a user can cause, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        status = _run(argv)
        sys.stdout.flush()  # here, where a closed pipe is caught, and not at exit
        return status
    except BadUsage as error:
        if config.resolve().rank == 0:  # every rank has the same command line
            tell(error)
        return EXIT_ERROR
    except HeadraceError as error:
        tell(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except MemoryError:
        tell(HeadraceError(NO_MEMORY))
        return EXIT_ERROR
    except OSError as error:
        if error.errno == errno.ENOMEM and not error.filename:
            tell(HeadraceError(NO_MEMORY))
            return EXIT_ERROR
        # Python would complain again when it closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader (`| head`) has what it wants
            return 0
        what = error.filename or "The output can't be written"
        tell(HeadraceError(f"{what}: {error.strerror or error}; make room or choose another place, and run it again."))
        return EXIT_ERROR


def _run(argv: Sequence[str]) -> int:
    named = [word for word in argv if not word.startswith("-")][:1]
    top = parser(named)
    args = top.parse_args(argv)
    if args.command is None:
        top.print_help()
        return 0
    if config.resolve().ranks > 1 or config.resolve().left:
        from headrace.cli import ranks

        return ranks.run(args, module(args.command))
    return int(module(args.command).run(args))
