"""Launching over hosts without any host: the journal, the engine that goes on from one, and starting again.

Real hosts are in ``test_cluster_hosts.py``; here a program that plays mpirun and the head says what a test wants.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster import journal
from headrace.cluster.attempt import Attempt, Session
from headrace.cluster.journal import END, JOURNAL, LINE, TEXT, Book, Journal, Line, record
from headrace.cluster.launch import Launcher, Way
from headrace.engine import Engine, load
from headrace.errors import Unavailable
from headrace.run.types import Request, Sampling
from helpers_mpi import environment
from helpers_tiny import tiny_model

KEY, OTHER = b"k" * 16, b"o" * 16
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


# --- lines and records ----------------------------------------------------------------------------------


@given(st.sampled_from("hbatqjei"), st.binary(max_size=300))
def test_a_line_comes_back(kind: str, data: bytes) -> None:
    line = journal.write(kind, data)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) <= LINE
    assert journal.read(line) == Line(kind, data)


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_what_is_damaged_is_nobodys(data: bytes, noise: bytes, at: int, byte: int) -> None:
    assert journal.read(noise) is None or noise.startswith(journal.MARK)
    line = journal.write(JOURNAL, data)
    at %= len(line) - 1
    torn = line[:at]
    assert journal.read(torn) is None
    changed = line[:at] + bytes([byte]) + line[at + 1 :]
    assert journal.read(changed) in ((None,) if changed != line else (Line(JOURNAL, data),))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([KEY, OTHER]), IDS), max_size=12), st.integers(0, 4000))
def test_a_torn_journal_keeps_a_good_beginning(parts: list[tuple[bytes, list[int]]], cut: int) -> None:
    whole: dict[bytes, list[int]] = {KEY: [], OTHER: []}
    data = b""
    for key, tokens in parts:
        data += record(key, len(whole[key]), tokens)
        whole[key] += tokens
    torn = Journal()
    torn.hear(data[:cut])
    for key, tokens in whole.items():
        known = list(torn.known(key))
        assert known == tokens[: len(known)]
        assert len(known) == len(tokens) or cut < len(data)
    again = Journal()
    for data in torn.records():
        assert len(data) < 2 * journal.SMALL
        again.hear(data)
    assert all(list(again.known(key)) == list(torn.known(key)) for key in whole)


@given(st.lists(st.binary(max_size=120), max_size=20))
def test_hostile_records_do_no_harm(lines: list[bytes]) -> None:
    book = Journal()
    for data in lines:
        book.hear(data)
        book.hear(KEY + data)
    again = Journal()
    for data in book.records():
        again.hear(data)
    assert list(again.records()) == list(book.records())


def test_a_gap_a_count_past_the_end_and_what_is_over() -> None:
    book = Journal()
    book.hear(record(KEY, 0, [1, 2, 3]) + record(KEY, 5, [6]) + record(OTHER, 0, [9]))
    assert list(book.known(KEY)) == [1, 2, 3] and not book.known(OTHER), "nothing after a gap is believed"
    book.hear(KEY + b"\0\0\0\0" + b"\xff\xff\xff\xff" + b"\1\0\0\0" * 3)
    assert list(book.known(KEY)) == [1, 2, 3]
    book.hear(record(KEY, 1, [7]))
    assert list(book.known(KEY)) == [1, 7, 3], "a new head says the same again from the beginning"
    book.hear(record(KEY, journal.OVER))
    assert not book.known(KEY)


def test_a_journal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST", 1000)
    book = Journal()
    for i in range(300):
        book.hear(record(i.to_bytes(16, "little"), 0, range(i % 50)))
    held = [i for i in range(300) if book.known(i.to_bytes(16, "little"))]
    assert held and min(held) > 250 and max(held) == 299, "the oldest are forgotten"
    assert sum(len(data) for data in book.records()) < 20_000


# --- an engine that goes on -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("launch") / "tiny.gguf", blocks=2, text=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load(model, threads=1, context=256) as engine:
        yield engine


ASKED = [
    ({"max_tokens": 20, "ignore_eos": True}, Sampling()),
    ({"max_tokens": 24}, Sampling(temperature=1.2, seed=7, repeat_penalty=1.3)),
    ({"max_tokens": 24, "ignore_eos": True, "stop": ["e", "a"]}, Sampling(temperature=1.5, seed=3)),
]


@pytest.mark.parametrize(("more", "sampling"), ASKED)
def test_the_text_is_the_same_from_every_moment(
    engine: Engine, more: dict[str, object], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier start committed so many tokens: the text, its end and what the launcher hears are the same."""

    def told(before: Journal) -> tuple[str, str, Journal]:
        after = Journal()
        engine.follow(Book(lambda kind, data: after.hear(data) if kind == JOURNAL else None, before))
        pieces = list(engine.stream("once upon", sampling=sampling, **more))  # type: ignore[arg-type]
        return "".join(piece.text for piece in pieces), pieces[-1].finish, after

    monkeypatch.setattr(engine, "_book", None)
    text, finish, whole = told(Journal())
    (key, tokens), *_ = whole._known.items()
    assert len(tokens) > 2
    for count in range(len(tokens) + 1):
        before = Journal()
        before.hear(record(key, 0, tokens[:count]))
        runs = engine.head.counts.runs
        again, end, after = told(before)
        assert (again, end) == (text, finish)
        assert list(after.known(key)) == list(tokens)
        assert engine.head.counts.runs - runs <= len(tokens) - count + 2, "what was committed isn't computed again"


def test_a_journal_of_something_else_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_book", None)
    plain = "".join(piece.text for piece in engine.stream("once", max_tokens=8, ignore_eos=True))
    before = Journal()
    book = Book(lambda kind, data: None, before)
    engine.follow(book)
    request = Request(0, engine.encode("once"), 8, Sampling(), frozenset())
    for salt, tokens in (("another model", [5] * 8), (book.salt, [2**31, 2**32 - 1])):
        other = Book(lambda kind, data: before.hear(data), Journal())
        other.salt = salt
        other.begin(request, 1 << 32)
        for token in tokens:
            other.token(0, token)
        other.flush()
        assert "".join(piece.text for piece in engine.stream("once", max_tokens=8, ignore_eos=True)) == plain
    wordy = Request(1, request.tokens, 8, Sampling(logprobs=2), frozenset())
    assert book.begin(wordy, 288) == (), "log-probabilities aren't in the journal"


# --- starting again -------------------------------------------------------------------------------------

FAKE = """
import io, os, signal, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from headrace.cluster import journal as j
tries = Path({count!r})
n = int(tries.read_text()) if tries.exists() else 0
tries.write_text(str(n + 1))
known = j.Journal()
def say(kind, data=b""):
    sys.stdout.buffer.write(j.write(kind, data)); sys.stdout.buffer.flush()
source = j.In(0, say)
while (said := source.take()).kind == j.JOURNAL:
    known.hear(said.data)
sys.stdin = io.TextIOWrapper(io.BufferedReader(source))
KEY = b"k" * 16
def end(status=0, lost=b""):
    say(j.END, bytes([status]) + lost)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
left = [w for w in sys.argv if w.startswith("HEADRACE_LAUNCHER=")][0].split(":")[1]
say(j.BEGUN)
{body}
"""


def launch(
    folder: Path, body: str, *flags: str, words: tuple[str, ...] = ("run", "hi"), typed: bytes = b"", rest: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """``headrace launch`` with a program in the place of mpirun and the head; ``body`` is what that does."""
    fake = folder / "fake.py"
    fake.write_text(FAKE.format(path=sys.path, count=str(folder / "tries"), body=body))
    start = ["launch", "--hosts", "localhost", "--mpirun", f"{sys.executable} {fake}", *flags, "--", *words]
    changed = f"import sys; {rest}; from headrace.cli.main import main; sys.exit(main({start!r}))"
    command = [sys.executable, "-c", changed] if rest else [sys.executable, "-m", "headrace", *start]
    return subprocess.run(command, env=environment(), input=typed, capture_output=True, timeout=120, check=False)


def test_nothing_is_told_twice_and_the_journal_comes_back(tmp_path: Path) -> None:
    """Killed in the midst of the text, and of a line, twice; the third start has all that was committed."""
    body = """
say(j.TEXT, "Once upon \\xe4 time".encode()[: (11, 8, 99)[n]])
print("a line of a rank's", flush=True)
say(j.JOURNAL, j.record(KEY, len(known.known(KEY)), [n]))
if n < 2:
    sys.stdout.buffer.write(j.write(j.TEXT, b" never told")[:-9]); sys.stdout.buffer.flush()
    die()
assert list(known.known(KEY)) == [0, 1], list(known.known(KEY))
end(1)
"""
    done = launch(tmp_path, body)
    assert done.stdout == "Once upon ä time".encode() and done.returncode == 1, done.stderr
    said = done.stderr.decode()
    assert said.count("a line of a rank's") == 3 and "(2 of at most 5 times)" in said


def test_another_text_after_a_loss_is_an_error(tmp_path: Path) -> None:
    done = launch(tmp_path, 'say(j.TEXT, b"one two" if n == 0 else b"one six")\ndie() if n == 0 else end()')
    assert done.returncode == 2 and done.stdout == b"one two"
    assert b"another text than before the loss" in done.stderr


def test_figures_are_told_once_from_the_last_start(tmp_path: Path) -> None:
    body = 'say(j.TEXT, b"%d tokens/s" % n)\nend(0, b"Lost: rank 1 on host b.") if n == 0 else end()'
    done = launch(tmp_path, body, words=("run", "--json", "hi"))
    assert (done.returncode, done.stdout) == (0, b"1 tokens/s")
    assert b"Lost: rank 1 on host b. Starting again over localhost" in done.stderr


def test_input_is_given_again_from_the_beginning(tmp_path: Path) -> None:
    body = """
line = sys.stdin.readline() + sys.stdin.readline()
say(j.TEXT, line.encode())
die() if n == 0 else None
say(j.TEXT, sys.stdin.read().encode())
end()
"""
    done = launch(tmp_path, body, words=("chat",), typed=b"one\ntwo\nthree\n")
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\nthree\n"), done.stderr


@pytest.mark.parametrize(
    ("body", "flags", "tries", "says"),
    [
        ("die()", ("--restarts", "2"), 3, "The head is gone. Given up after 2 new starts"),
        ("end(2)", (), 1, ""),
        ("time.sleep(60)", ("--restarts", "0"), 1, "The head has said nothing for"),
    ],
)
def test_when_it_is_given_up(tmp_path: Path, body: str, flags: tuple[str, ...], tries: int, says: str) -> None:
    hasty = "import headrace.cluster.attempt as a; a.SILENCE = 1.0; a.PARTING = 1.0"
    done = launch(tmp_path, body, *flags, rest=hasty)
    assert done.returncode == 2 and (tmp_path / "tries").read_text() == str(tries)
    assert says in done.stderr.decode()


def test_a_start_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    fake = tmp_path / "fails"
    fake.write_text("#!/bin/sh\necho mpirun: no such option >&2\nexit 7\n")
    fake.chmod(0o755)
    words = ["launch", "--hosts", "localhost", "--mpirun", str(fake), "--", "run", "hi"]
    command = [sys.executable, "-m", "headrace", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "no such option" in done.stderr and "failed with status 7" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "a,-oProxyCommand=x", "--", "run", "x"], "is no host name"),
        (["--hosts", "a,a", "--", "run", "x"], "named twice"),
        (["--hosts", "a", "--", "inspect", "x"], "a command is expected"),
        (["--hosts", "a"], "a command is expected"),
        (["--hosts", "a", "run", "--bogus"], "unrecognized arguments: --bogus"),
        (["--hosts", "a,b", "--slots", "1", "--", "run", "x"], "1 slots are given for 2 hosts"),
        (["--hosts", "a", "--slots", "99999999", "--", "run", "x"], "at most 4096"),
        (["--hosts", "a", "--mpirun", '"', "--", "run", "x"], "a quotation mark that isn't closed"),
        (["--hosts", "a", "--ssh", "", "--", "run", "x"], "words of an ssh client"),
        (["--hosts", "a", "--ssh", "false", "--", "run", "x"], "a can't be reached (status 1)"),
    ],
)
def test_what_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main

    flags = ["--mpirun", "true"] if "--ssh" in words else []
    assert main(["launch", *flags, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headrace: ") and says in said and said.count("\n") == 1


def test_ranks_that_are_left_keep_their_numbers() -> None:
    from headrace.cluster.attempt import Session

    way = Way(("ssh",), ("mpirun",), "python")
    job = Launcher(way, [("a", 1), ("b", 2), ("c", 1)], ["run"], Session(), job="j")
    words = job.command([("b", 2), ("c", 1)])
    assert "HEADRACE_LAUNCHER=j:1,2,3" in words and "b:2,c:1" in words and words[words.index("-n") + 1] == "3"


def test_what_was_given_for_each_rank_is_for_those_left() -> None:
    import argparse

    from headrace.cli.launched import only_left

    args = argparse.Namespace(threads=(6, 32, 20), threads_batch=(4,), layer_split="0.1,0.4,0.5")
    only_left(args, (0, 1, 2))
    assert (args.threads, args.layer_split) == ((6, 32, 20), "0.1,0.4,0.5")
    only_left(args, (0, 2))
    assert (args.threads, args.threads_batch, args.layer_split) == ((6, 20), (4,), None)


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    """Ctrl-C goes to the head as a signal that mpirun carries; SIGTERM ends everything at once."""
    fake = tmp_path / "fake.py"
    body = 'signal.signal(signal.SIGUSR1, lambda *_: (end(130), os._exit(0)))\nsay(j.TEXT, b"x")\ntime.sleep(60)'
    fake.write_text(FAKE.format(path=sys.path, count=str(tmp_path / "tries"), body=body))
    start = ["launch", "--hosts", "localhost", "--mpirun", f"{sys.executable} {fake}", "--", "run", "hi"]
    command = [sys.executable, "-m", "headrace", *start]
    pipe = subprocess.PIPE
    # Started in the background by a shell, these tests would hand down an ignored Ctrl-C.
    wanted = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    job = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, preexec_fn=wanted)
    try:
        assert job.stdout is not None and job.stdout.read(1) == b"x"
        time.sleep(0.1)
        job.send_signal(number)
        job.communicate(timeout=120)
        assert job.returncode == 128 + number and (tmp_path / "tries").read_text() == "1"
    finally:
        job.kill()


def test_text_and_other_lines_keep_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        raw = journal.Out(file.fileno())
        raw.write(b"a" * (journal.PART + 1))
        raw.say(END, b"\0")
    said = [journal.read(line) for line in out.read_bytes().splitlines(keepends=True)]
    assert said == [Line(TEXT, b"a" * journal.PART), Line(TEXT, b"a"), Line(END, b"\0")]


def test_input_that_mpirun_loses_is_asked_for_again() -> None:
    """Each line is dropped, torn or repeated at first; what comes out is whole."""
    import os

    there, here = os.pipe()
    script = [Line(JOURNAL, b"one"), Line(END, b""), Line(journal.INPUT, b"typed \n"), Line(END, b"")]
    asked: list[int] = []

    def say(kind: str, data: bytes) -> None:
        assert kind == journal.HERE
        (number,) = journal.NUMBER.unpack(data)
        asked.append(number)
        line = b"\n" + journal.write(script[number].kind, data + script[number].data)
        tries = asked.count(number)
        os.write(here, b"" if tries == 1 else line[:-5] if tries == 2 else line + line)

    try:
        source = journal.In(there, say)
        assert [source.take(), source.take()] == script[:2]
        assert source.readall() == b"typed \n"
        assert asked == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    finally:
        os.close(there)
        os.close(here)


def test_an_mpirun_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(Unavailable, match=r"/no/such/mpirun: can't be started \(No such file"):
        Attempt(["/no/such/mpirun"], Session()).run()
