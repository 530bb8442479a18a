"""What the commands that generate text share: loading, the prompt, Ctrl-C, and the line of figures."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from headrace import config, system
from headrace.cli.planned import choosing, expected_json, expected_line
from headrace.cli.show import Bar, human, note
from headrace.errors import BadFile, BadRequest, Unavailable
from headrace.formats.files import atomic
from headrace.store.find import find, here

if TYPE_CHECKING:
    from headrace.engine import Engine, Figures, Piece
    from headrace.options import Options
    from headrace.plan.cost import Prediction
    from headrace.results import Totals

MAX_PROMPT = 64 << 20
"""Bytes of a prompt file: past any context, and a wrong file is noticed before it fills the memory."""
SAME = ("layer_split", "ship", "context", "kv_bits", "requant", "kv_disk", "kv_frames", "ram")
"""Options of the command line that are fields of ``Options`` as they stand."""
PATIENCE = 1.0
"""Seconds without a word after which a person is told what is going on."""


def load(
    args: argparse.Namespace, work: tuple[int, int, int], free: Collection[str] = ("rows", "runs"), **more: Any
) -> Engine:
    """The engine that ``options.add_model``'s options describe; the model is fetched first when it has to be.

    work: what it is loaded for: prompt tokens, new tokens, sequences; about. free: what --ram lets the planner choose.
    """
    writable(args.trace, "trace")
    path = find_model(args)
    from headrace.engine import load  # the heavy part: after anything that can fail early

    with waiting(f"loading {path.name}"):
        options = choosing(args, replace(machine_of(args), **more), work, free)
        engine = load(path, options, link=args.link)
    if args.book is not None:
        engine.follow(args.book)
    if args.trace or engine.parts.loop.targets > 1 or engine.parts.loop.drafting:
        engine.watch(bool(args.trace))
    return engine


def find_model(args: argparse.Namespace) -> Path:
    return find_named(args.model, args)


def find_named(name: str | None, args: argparse.Namespace | None = None) -> Path:
    """A model's path; one that isn't there on a rank that is shipped what it lacks."""
    if args is not None and args.link and args.link.rank and args.ship:
        return here(name, config.resolve()) or Path(name or "model")
    with Bar() as bar:
        return find(name, config.resolve(), note, bar)


@contextmanager
def described(text: str) -> Iterator[tuple[Path, str]]:
    """(path, what to call it) of a model to be looked at: of one on a hub that isn't here its configuration alone."""
    if not text.startswith("hf:"):
        yield (path := find_named(text)), str(path)
        return
    from headrace.store import hub

    name, settings = hub.parse(text), config.resolve()
    with tempfile.TemporaryDirectory() as folder:
        here = hub.cached(name, settings)
        yield here or hub.configuration(name, settings, Path(folder)), str(here or text)


def machine_of(args: argparse.Namespace) -> Options:
    """What ``options.add_machine``'s options say, the same on every rank."""
    from headrace.cli.device import device_of
    from headrace.cli.drafting import drafting_of
    from headrace.options import Options

    if args.numa:
        system.interleave()
    return Options(
        **drafting_of(args),
        **device_of(args),
        **{name: getattr(args, name) for name in SAME},
        batch_threads=args.threads_batch or (),
        threads=0 if args.link else system.cores(),
        rank_threads=args.threads or (),
        tell=note,
    )


# --- the prompt -------------------------------------------------------------------------------------------


def read_text(source: str) -> str:
    """A prompt file's text ("-": standard input), less one newline at its end. BadFile says what is wrong with it."""
    name = "standard input" if source == "-" else source
    try:
        with nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as file:
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


class Interruptible(Protocol):
    """An engine, or a job that runs on one."""

    def interrupt(self) -> None: ...


@contextmanager
def interruptible(work: Interruptible) -> Iterator[None]:
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
        work.interrupt()

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
        raise BadFile(
            "The model's output stopped being finite numbers; its file is damaged, or not made for this format."
        )


# --- figures ----------------------------------------------------------------------------------------------


def weight_rate(figures: Figures) -> float:
    """Bytes/s of weights that the decode passes read."""
    return figures.decode_rate * figures.weight_bytes


def figures_line(
    figures: Figures,
    bandwidth: float | None,
    finish: str,
    totals: Totals | None = None,
    plan: Prediction | None = None,
) -> str:
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
    if plan is not None:
        parts.append(expected_line(plan))
    if totals is not None:
        parts += seen(totals, figures.last - figures.started, figures.tokens)
    ends = {"length": "cut by -n or the context", "stop": "ended by --stop", "cancelled": "interrupted"}
    if finish in ends:
        parts.append(ends[finish])
    return " · ".join(parts)


def seen(totals: Totals, seconds: float, tokens: int) -> list[str]:
    """Parts of a line: guesses, bubbles and bytes, where there were guesses or several stages."""
    parts = []
    if totals.launched:
        parts.append(f"guesses: {totals.launched} launched, {totals.accepted} accepted, {totals.cancelled} cancelled")
    if totals.launched or totals.hops:
        parts.append(f"bubble {100 * totals.bubble(seconds):.0f}%")
    sent = totals.hop_bytes(tokens)
    return parts if sent is None else [*parts, f"{human(sent)} a token a hop"]


def figures_json(
    figures: Figures, bandwidth: float | None, totals: Totals | None = None, plan: Prediction | None = None
) -> dict[str, Any]:
    t, seconds = totals, figures.last - figures.started
    more: dict[str, Any] = {} if t is None else {
        "guesses_launched": t.launched,
        "guesses_accepted": t.accepted,
        "guesses_cancelled": t.cancelled,
        "bubble_share": t.bubble(seconds),
        "hop_bytes_per_token": t.hop_bytes(figures.tokens),
    }  # fmt: skip
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
        **more,
        **({} if plan is None else {"predicted": expected_json(plan)}),
    }


def writable(path: Path | None, what: str) -> None:
    """BadRequest where a file of that name can't be, before anything is computed for it."""
    if path is not None and path.is_dir():
        raise BadRequest(f"{path}: is a folder; give the {what} a file's name.")
    if path is not None and not path.parent.is_dir():
        raise BadRequest(f"{path}: there is no such folder for the {what}; make it first.")


def write_file(path: Path, text: str) -> None:
    """The whole text, or what was there before; also to what is no plain file, like /dev/stdout."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
            return
        with atomic(path) as file:
            file.write(text.encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(f"{path}: can't be written ({error.strerror}); make room or choose another place.") from None


def write_trace(args: argparse.Namespace, engine: Engine) -> None:
    """What ``--trace`` asks for."""
    if args.trace:
        write_file(args.trace, engine.trace())


def dim(text: str) -> str:
    """Text in the background, where standard error is a terminal with colours."""
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() and config.resolve().colour else text
