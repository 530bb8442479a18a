"""``headrace run``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli import generation as g
from headrace.cli import options
from headrace.cli.planned import ANSWER, expected, tokens_of
from headrace.cli.show import EXIT_INTERRUPTED, note
from headrace.errors import BadRequest
from headrace.run.types import Sampling

if TYPE_CHECKING:
    from headrace.engine import Engine


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answers a prompt, or continues it. The text streams to stdout; a line of figures follows on stderr.\n\n"
        "A model that brings a chat template is given the prompt as a user's message in it (--raw: as it is). Tokens "
        "are chosen greedily unless --temp says otherwise."
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to answer or continue")
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="read the prompt from a file, less its last newline; - is standard input"
    )
    escape = r"read \n, \t, \xHH and the like in prompt, system message and stop texts"
    parser.add_argument("-e", "--escape", action="store_true", help=escape)
    style = parser.add_mutually_exclusive_group()
    insist = "insist on a chat template (default: when the model has one)"
    style.add_argument("--chat", action="store_true", help=insist)
    style.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt (with a chat template)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    options.add_trace(parser)
    options.add_model(parser)
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    prompt, system, stops = texts(args)
    sampling = options.sampling_of(args)
    work = tokens_of(prompt + (system or "")), args.tokens or ANSWER, 1
    with g.load(args, work, sequences=1) as engine:
        ids = encode(engine, args, prompt, system)
        text, finish = _stream(engine, args, ids, sampling, stops)
        figures, bandwidth, totals = engine.figures(), engine.bandwidth(), engine.totals()
        plan = expected(engine, figures.prompt_tokens - figures.reused_tokens, figures.tokens)
        if args.json and finish != "error":
            answer = {"text": text, "finish": finish, "figures": g.figures_json(figures, bandwidth, totals, plan)}
            print(json.dumps(answer, ensure_ascii=False, indent=1), flush=True)
        elif finish != "error":
            note(g.dim(g.figures_line(figures, bandwidth, finish, totals, plan)))
        g.write_trace(args, engine)  # last: when it can't be written, nothing else is lost
    g.require_numbers(finish)
    return EXIT_INTERRUPTED if finish == "cancelled" else 0


def texts(args: argparse.Namespace) -> tuple[str, str | None, list[str]]:
    """(prompt, system message, stop texts) as they are meant. BadRequest or BadFile before any model is touched."""
    if (args.prompt is None) == (args.file is None):
        both = "both a PROMPT and -f FILE are given; leave one out" if args.file else "there is no prompt"
        raise BadRequest(f"{both.capitalize()}: give a PROMPT or -f FILE (or try `headrace chat`).")
    prompt = g.read_text(args.file) if args.file is not None else args.prompt
    system, stops = args.system, args.stop
    if args.escape:
        prompt, stops = g.unescape(prompt), [g.unescape(stop) for stop in stops]
        system = g.unescape(system) if system is not None else None
    if not prompt:
        raise BadRequest("The prompt is empty; give some text.")
    if not all(stops):
        raise BadRequest("A --stop text is empty; leave it out.")
    if args.raw and system is not None:
        raise BadRequest("--system needs a chat template and --raw is for none; leave one out.")
    return prompt, system, stops


def encode(engine: Engine, args: argparse.Namespace, prompt: str, system: str | None) -> str | list[int]:
    """The prompt as the engine takes it: ids through the chat template, or text."""
    if args.raw or not (args.chat or engine.tokenizer.template):
        if system is not None:
            raise BadRequest("--system needs a chat template, and this model has none; try --chat.")
        return str(prompt)
    from headrace.text.template import ChatTemplate

    messages = [{"role": "system", "content": system}] if system is not None else []
    return ChatTemplate(engine.tokenizer).encode([*messages, {"role": "user", "content": prompt}])


def _stream(
    engine: Engine, args: argparse.Namespace, ids: str | Sequence[int], sampling: Sampling, stops: list[str]
) -> tuple[str, str]:
    """Generate -> (text, finish), writing the text as it comes."""
    pieces, finish = [], ""
    stream = engine.stream(
        ids, max_tokens=args.tokens or options.DEFAULT_TOKENS, sampling=sampling, stop=stops, ignore_eos=args.ignore_eos
    )
    with g.interruptible(engine):
        for piece in g.patiently(stream, "reading the prompt"):
            pieces.append(piece.text)
            finish = piece.finish or finish
            if not args.json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    text = "".join(pieces)
    if not args.json and not text.endswith("\n"):
        print()
    return text, finish
