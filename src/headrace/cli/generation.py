"""What the commands that generate text share: their options, the prompt, Ctrl-C, and the line of figures."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace import config, system
from headrace.cli.parser import kv_bits, real, size, whole
from headrace.cli.show import Bar, human, note
from headrace.errors import BadFile, BadRequest
from headrace.run.types import Sampling
from headrace.store import known
from headrace.store.find import find

if TYPE_CHECKING:
    from headrace.engine import Engine, Figures, Piece

MAX_PROMPT = 64 << 20
"""Bytes of a prompt file: past any context, and a wrong file is noticed before it fills the memory."""
PATIENCE = 1.0
"""Seconds without a word after which a person is told what is going on."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and what it may use."""
    group = parser.add_argument_group("model and machine")
    group.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face folder, hf:ORG/REPO[:FILE], or a known model's name "
        f"({', '.join(known.KNOWN)}); default {known.DEMO.name}, fetched when it isn't there ({known.DEMO.nbytes / 1e6:.0f} MB)",
    )
    group.add_argument("-c", "--context", type=whole(2), metavar="N", help="tokens of context to have room for (default: the model's, at most 4096)")  # fmt: skip
    group.add_argument("-t", "--threads", type=whole(1, 1024), metavar="N", help="threads that compute (default: one per core)")  # fmt: skip
    group.add_argument("--kv-bits", type=kv_bits, default=(16, 16), metavar="K/V", help="bits of the cached keys and values: 16/16 (default), 8/8, 8/4, 4/4; fewer bits make a different model, slightly")  # fmt: skip
    group.add_argument("--ram", type=size, metavar="SIZE", help="the most memory to use, like 800M or 2G; refused before loading when the model needs more (default: no limit)")  # fmt: skip


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and when to stop."""
    group = parser.add_argument_group(
        "choosing tokens",
        "The text is a function of model, prompt, these options and the seed: not of threads, machine or load.",
    )
    group.add_argument("-n", "--tokens", type=whole(1), metavar="N", help="at most N new tokens (default: until the model ends, or 1024)")  # fmt: skip
    group.add_argument("--temp", type=real(-math.inf), default=0.0, metavar="T", help="temperature; 0 (default) or less always takes the likeliest token; 0.7 varies, and gets out of loops")  # fmt: skip
    group.add_argument("--top-k", type=whole(0), default=0, metavar="N", help="choose among the N likeliest (default 0: all)")  # fmt: skip
    group.add_argument("--top-p", type=real(0, 1, above=True), default=1.0, metavar="P", help="choose among the likeliest that together have probability P (default 1: all)")  # fmt: skip
    group.add_argument("--min-p", type=real(0, 1), default=0.0, metavar="P", help="leave out tokens less likely than P times the likeliest (default 0: none)")  # fmt: skip
    group.add_argument("--repeat-penalty", type=real(0, above=True), default=1.0, metavar="X", help="make tokens seen lately less likely (default 1: no)")  # fmt: skip
    group.add_argument("--repeat-last-n", type=whole(-1), default=64, metavar="N", help="how far the penalty looks back (default 64; 0 not at all, -1 over everything)")  # fmt: skip
    group.add_argument("--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help="the same seed gives the same text (default 0)")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on when the model wants to end")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be given several times")  # fmt: skip


DEFAULT_TOKENS = 1024


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        repeat_last_n=args.repeat_last_n,
        seed=args.seed,
    )


def load(args: argparse.Namespace, **more: Any) -> Engine:
    """The engine that ``add_model``'s options describe; the model is fetched first when it has to be."""
    with Bar() as bar:
        path = find(args.model, config.resolve(), note, bar)
    from headrace.engine import load  # the heavy part: after anything that can fail early

    with waiting(f"loading {path.name}"):
        return load(
            path,
            threads=args.threads or system.cores(),
            context=args.context,
            kv_bits=args.kv_bits,
            ram=args.ram,
            **more,
        )


# --- the prompt -------------------------------------------------------------------------------------------


def read_text(source: str) -> str:
    """A prompt file's text ("-": standard input), less one newline at its end. BadFile says what is wrong with it."""
    name = "standard input" if source == "-" else source
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MAX_PROMPT + 1)
    except FileNotFoundError:
        raise BadFile(f"{name}: there is no such prompt file; check the path.") from None
    except IsADirectoryError:
        raise BadFile(f"{name}: is a directory where a prompt file was expected.") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{name}: the prompt can't be read ({getattr(error, 'strerror', None) or error}).") from None
    if len(data) > MAX_PROMPT:
        raise BadFile(f"{name}: is over {MAX_PROMPT >> 20} MiB, longer than any context; is it the right file?")
    return _decode(data, name).removesuffix("\n").removesuffix("\r")


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{name}: is no UTF-8 text (byte 0x{data[error.start]:02x} at position {error.start}); convert it, for "
            "example with `iconv -t UTF-8`."
        ) from None


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"0": b"\0", b"\\": b"\\", b"'": b"'", b'"': b'"'}


def unescape(text: str) -> str:
    r"""``\n``, ``\t``, ``\r``, ``\0``, ``\\``, ``\'``, ``\"`` and ``\xHH`` (a byte) as what they stand for."""

    def one(found: re.Match[bytes]) -> bytes:
        if found[1]:
            return bytes.fromhex(found[1].decode())
        if found[2] not in _ESCAPES:
            written = found[0].decode(errors="replace")
            raise BadRequest(f"{written!r} is no escape that -e knows; write a backslash as two.".replace("\\\\", "\\"))
        return _ESCAPES[found[2]]

    return _decode(re.sub(rb"\\(?:x([0-9a-fA-F]{2})|(.?))", one, text.encode(), flags=re.DOTALL), "the prompt after -e")


# --- while it runs ----------------------------------------------------------------------------------------


@contextmanager
def interruptible(engine: Engine) -> Iterator[None]:
    """Ctrl-C ends the request under way within a layer, as a normal finish; a second one ends the program."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # as under nohup: whoever started us doesn't want it
        yield
        return
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        engine.interrupt()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class waiting:
    """Says what is going on when it takes long, on a terminal only, and wipes it afterwards."""

    def __init__(self, what: str) -> None:
        self._what, self._done = what, threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True) if sys.stderr.isatty() else None
        self._shown = False

    def _tell(self) -> None:
        start = time.monotonic()
        pause = PATIENCE
        while not self._done.wait(pause):
            self._shown, pause = True, 0.5
            print(f"\r{self._what} ... {time.monotonic() - start:.0f} s\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> waiting:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def patiently(pieces: Iterator[Piece], what: str) -> Iterator[Piece]:
    """The same pieces; says ``what`` while the first takes long."""
    with waiting(what):
        first = next(pieces, None)
    if first is not None:
        yield first
    yield from pieces


def require_numbers(finish: str) -> None:
    """BadFile when a request ended because the model computed something that is no number."""
    if finish == "error":
        raise BadFile("The model's output stopped being finite numbers; its file is damaged, or not made for this format.")


# --- figures ----------------------------------------------------------------------------------------------


def weight_rate(figures: Figures) -> float:
    """Bytes/s of weights that the decode passes read."""
    return figures.decode_rate * figures.weight_bytes


def figures_line(figures: Figures, bandwidth: float | None, finish: str) -> str:
    """One line, honest: what was waited for, both rates, and how near decoding came to what the memory can give."""
    new = figures.prompt_tokens - figures.reused_tokens
    parts = [f"prompt {new} tokens" + (f" (+{figures.reused_tokens} cached)" if figures.reused_tokens else "")]
    if figures.tokens:
        parts[0] += f", {figures.prefill_rate:.0f}/s"
        parts.append(f"first token after {figures.ttft:.2f} s")
    parts.append(f"{figures.tokens} tokens" + (f", {figures.decode_rate:.1f}/s" if figures.decode_rate else ""))
    if figures.decode_rate and bandwidth:
        rate = weight_rate(figures)
        parts.append(f"weights {human(rate)}/s, {100 * rate / bandwidth:.0f}% of {human(bandwidth)}/s measured")
    ends = {"length": "cut by -n or the context", "stop": "ended by --stop", "cancelled": "interrupted"}
    if finish in ends:
        parts.append(ends[finish])
    return " · ".join(parts)


def figures_json(figures: Figures, bandwidth: float | None) -> dict[str, float | int | None]:
    return {
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.reused_tokens,
        "tokens": figures.tokens,
        "ttft_s": figures.ttft,
        "prefill_tokens_per_s": figures.prefill_rate,
        "decode_tokens_per_s": figures.decode_rate,
        "weight_bytes_per_token": figures.weight_bytes,
        "weight_bytes_per_s": weight_rate(figures),
        "bandwidth_bytes_per_s": bandwidth,
        "peak_rss_bytes": system.peak_rss(),
    }


def dim(text: str) -> str:
    """Text in the background, where standard error is a terminal with colours."""
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() and config.resolve().colour else text
