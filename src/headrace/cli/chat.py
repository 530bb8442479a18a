"""``headrace chat``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from headrace.cli import generation as g
from headrace.cli import options
from headrace.cli.planned import ANSWER, expected
from headrace.cli.show import note
from headrace.cluster.journal import QUESTION, Book
from headrace.errors import BadRequest, HeadraceError
from headrace.run.types import Sampling

if TYPE_CHECKING:
    from headrace.engine import Engine
    from headrace.results import Totals
    from headrace.text.template import ChatTemplate

HELP = """/reset        forget the conversation (the system message stays)
/undo         forget the last question and its answer
/help         this list
/exit         leave; so does Ctrl-D
Ctrl-C        stop the answer; at the prompt: leave
A line that ends in \\ goes on in the next."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talks with a model, turn by turn; what was said stays computed, so a turn costs only its own words. "
        "Answers go to stdout, the prompt and the figures to stderr; without a terminal a line is a turn.\n\n"
        "In the conversation /help lists the commands."
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before everything")
    options.add_trace(parser)
    options.add_model(parser)
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    sampling = options.sampling_of(args)
    if not all(args.stop):
        raise BadRequest("A --stop text is empty; leave it out.")
    with g.load(args, (ANSWER, ANSWER, 1), sequences=1) as engine:
        from headrace.text.template import ChatTemplate

        try:
            Conversation(engine, ChatTemplate(engine.tokenizer), args, sampling).talk()
        finally:
            g.write_trace(args, engine)
    return 0


class Conversation:
    """The messages so far, and one turn after the other."""

    def __init__(self, engine: Engine, template: ChatTemplate, args: argparse.Namespace, sampling: Sampling) -> None:
        self.engine, self.template, self.args, self.sampling = engine, template, args, sampling
        self.start = [{"role": "system", "content": args.system}] if args.system is not None else []
        self.messages = list(self.start)
        self.totals: Totals | None = None

    def talk(self) -> None:
        """Until the end of input. An error of one turn is told and the conversation goes on."""
        terminal = sys.stdin.isatty()
        if terminal:
            import readline  # noqa: F401 (gives input() a history and editing)

            note(g.dim("/help for help, Ctrl-D to leave"))
        while (line := read_line(terminal, self.args.book)) is not None:
            if line.strip().startswith("/"):
                if self.command(line.strip()):
                    return
            elif line.strip():
                try:
                    self.turn(line)
                except HeadraceError as error:
                    if not terminal:
                        raise
                    note(f"headrace: {error}")

    def command(self, line: str) -> bool:
        """Carry out a command; True to leave."""
        if line in ("/exit", "/quit"):
            return True
        if line == "/reset":
            self.messages = list(self.start)
            note(g.dim("forgotten"))
        elif line == "/undo":
            del self.messages[max(len(self.start), len(self.messages) - 2) :]
            note(g.dim("the last turn is forgotten"))
        elif line == "/help":
            note(HELP)
        else:
            note(f"There is no command {line.split()[0]}; /help lists them.")
        return False

    def turn(self, text: str) -> None:
        """One question and its answer; kept only when the answer came, in part or whole."""
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.template.encode(asked)
        answer, finish = [], ""
        most = self.args.tokens or options.DEFAULT_TOKENS
        stream = self.engine.stream(
            ids,
            max_tokens=most,
            sampling=self.sampling,
            stop=self.args.stop,
            ignore_eos=self.args.ignore_eos,
            keep=True,
        )
        with g.interruptible(self.engine):
            for piece in g.patiently(stream, "reading"):
                answer.append(piece.text)
                finish = piece.finish or finish
                print(piece.text, end="", flush=True)
        print(flush=True)
        g.require_numbers(finish)
        totals = self.engine.totals()
        since, self.totals = totals.since(self.totals) if totals else None, totals
        f = self.engine.figures()
        plan = expected(self.engine, f.prompt_tokens - f.reused_tokens, f.tokens)
        note(g.dim(g.figures_line(f, None, finish, since, plan)))
        if any(answer):
            self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]


def read_line(terminal: bool, book: Book | None = None) -> str | None:
    r"""A turn's text, lines that end in \ joined; None at the end of input or after Ctrl-C at the prompt.

    book: what a launcher is asked through, where there is one.
    """
    lines: list[str] = []
    while True:
        try:
            if terminal:
                sys.stdout.flush()
                line = input("... " if lines else "> ")
            else:
                if book is not None:
                    book.say(QUESTION, b"... " if lines else b"> ")
                line = sys.stdin.readline()
                if not line:
                    return "\n".join(lines) if lines else None
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError:
            raise BadRequest(
                "Standard input is no UTF-8 text; convert it, for example with `iconv -t UTF-8`."
            ) from None
        line = line.rstrip("\n")
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
