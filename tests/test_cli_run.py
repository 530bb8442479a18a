"""``headrace run``, ``chat`` and ``bench`` on a real model: text, figures, every bad input, Ctrl-C."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from headrace.cli import bench
from headrace.cli import generation as g
from headrace.cli.main import EXIT_INTERRUPTED, main
from headrace.engine import Engine, Figures, load
from headrace.errors import BadFile, BadRequest
from helpers_text import smollm2

MODEL = str(smollm2())
RAW = ["run", "-m", MODEL, "--raw", "-c", "256"]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(MODEL, threads=2, context=256) as loaded:
        yield loaded


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands find the model loaded already."""
    monkeypatch.setattr(g, "load", lambda args, *work, **more: nullcontext(engine))


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert main(list(argv)) == status, capsys.readouterr().err
    out, err = capsys.readouterr()
    return out, err


@pytest.mark.usefixtures("loaded")
def test_text_goes_to_stdout_and_figures_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *RAW, "-n", "8", PROMPT)
    assert out.startswith(" Paris.") and out.endswith("\n")
    for part in ("prompt 5 tokens", "first token after", "8 tokens, ", "weights ", "% of ", "cut by -n"):
        assert part in err
    assert len(err.splitlines()) == 1


def test_json_and_text_and_threads_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT + "\n")
    sampled = ["-n", "12", "--temp", "0.9", "--top-p", "0.95", "--seed", "3", "--repeat-penalty", "1.1"]
    text, _ = run(capsys, *RAW, *sampled, "-t", "1", PROMPT)
    out, err = run(capsys, *RAW, *sampled, "-t", "2", "--json", "-f", str(tmp_path / "p.txt"))
    answer = json.loads(out)
    assert answer["text"] == text.removesuffix("\n") and answer["finish"] == "length" and err == ""
    figures = answer["figures"]
    assert figures["prompt_tokens"] == 5 and figures["tokens"] == 12
    assert figures["ttft_s"] > 0 and figures["weight_bytes_per_token"] > 90e6


@pytest.mark.usefixtures("loaded")
def test_the_chat_template_is_used_when_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ["run", "-m", MODEL, "-c", "256", "-n", "20"]
    out, err = run(capsys, *chat, "What is the capital of Australia?")
    assert "Canberra" in out and "prompt 37 tokens" in err
    _, plain = run(capsys, *chat, "--raw", "What is the capital of Australia?")
    assert "prompt 7 tokens" in plain
    _, own = run(capsys, *chat, "--system", "Be brief.", "What is the capital of Australia?")
    assert "prompt 24 tokens" in own


@pytest.mark.usefixtures("loaded")
def test_stop_and_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    whole, _ = run(capsys, *RAW, "-n", "12", PROMPT)
    assert "\n" in whole.strip()
    out, err = run(capsys, *RAW, "-n", "12", "-e", "--stop", r"\n", r"The capital\x20of France is")
    assert out.strip() == whole.split("\n")[0].strip() and "ended by --stop" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "There is no prompt"),
        ([""], "The prompt is empty"),
        (["-f", "/dev/null"], "The prompt is empty"),
        (["-f", "/no/such"], "there is no such prompt file"),
        (["-f", "/"], "is a directory"),
        (["x", "-f", "/dev/null"], "Both a prompt and -f file are given"),
        (["--stop", "", "x"], "--stop text is empty"),
        (["-e", r"a\q"], r"'\q' is no escape"),
        (["-e", "a\\"], "is no escape"),
        (["-e", r"\xff"], "no UTF-8"),
        (["--system", "s", "x"], "--system needs a chat template"),
        (["-c", "100000", "x"], "this model takes 2 to 8192"),
        (["-c", "16", "word " * 40], "The prompt has 41 tokens and the context is 16"),
        (["--ram", "20M", "x"], "the budget is 20 MiB"),
        (["--kv-bits", "16/5", "x"], "no pair of cache widths"),
        (["-m", "/", "x"], "holds no model"),
        (["-m", "nope", "x"], "Models known by name are smollm2-135m"),
    ],
)
def test_every_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *RAW, *argv, status=2)
    assert out == "" and said in err and err.startswith("headrace: ") and err.count("\n") == 1


def test_prompt_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p"
    for data, text in ((b"a\n\n", "a\n"), (b"a\r\n", "a"), ("ä\n".encode(), "ä"), (b"", "")):
        path.write_bytes(data)
        assert g.read_text(str(path)) == text
    path.write_bytes(b"ab\xff")
    with pytest.raises(BadFile, match="byte 0xff at position 2"):
        g.read_text(str(path))
    monkeypatch.setattr(g, "MAX_PROMPT", 3)
    path.write_bytes(b"abcd")
    with pytest.raises(BadFile, match="longer than any context"):
        g.read_text(str(path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
    assert g.read_text("-") == "hi"


def test_escapes() -> None:
    assert g.unescape(r"a\n\t\\n\x41\xc3\xa4\"") == 'a\n\t\\nAä"'
    for text in (r"\q", "\\", r"\x4"):
        with pytest.raises(BadRequest, match="is no escape"):
            g.unescape(text)


def test_the_line_of_figures_says_only_what_is_known() -> None:
    figures = Figures(prompt_tokens=10, started=0.0)
    assert g.figures_line(figures, 1e10, "cancelled") == "prompt 10 tokens · 0 tokens · interrupted"
    figures = Figures(
        prompt_tokens=10, reused_tokens=4, tokens=11, started=1.0, first=2.0, last=4.0, weight_bytes=10**9
    )
    assert g.figures_line(figures, 1e10, "end") == (
        "prompt 6 tokens (+4 cached), 6/s · first token after 1.00 s · 11 tokens, 5.0/s · "
        "weights 5.00 GB/s, 50% of 10.0 GB/s measured"
    )


# --- Ctrl-C -----------------------------------------------------------------------------------------------


def start(*argv: str) -> subprocess.Popen[bytes]:
    """The program, with Ctrl-C as a terminal gives it (what starts the tests may have it ignored)."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "from headrace.__main__ import start; sys.exit(start())"
    )
    return subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c_in_the_middle_prints_the_figures_so_far() -> None:
    child = start("run", "-m", MODEL, "--raw", "-c", "4096", "-n", "4000", "--ignore-eos", PROMPT)
    assert child.stdout is not None
    first = os.read(child.stdout.fileno(), 100)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == EXIT_INTERRUPTED
    assert (first + out).startswith(b" Paris") and (first + out).endswith(b"\n")
    assert "interrupted" in err.decode() and "Traceback" not in err.decode()


@pytest.mark.parametrize("wait", [0.0, 0.1, 0.4, 1.0])
def test_ctrl_c_while_starting_is_quiet(wait: float) -> None:
    """From the moment when the program is ours and not yet Python's own start."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); "
        "from headrace.__main__ import start; sys.exit(start())"
    )
    argv = ["run", "-m", MODEL, "--raw", "-c", "4096", "-n", "4000", "--ignore-eos", "word " * 2000]
    child = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(wait)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode in (EXIT_INTERRUPTED, -signal.SIGINT)  # a shell shows 130 for both
    assert b"Traceback" not in err and b"Error" not in err


def test_the_engine_is_as_new_after_an_interruption(engine: Engine) -> None:
    expected = "".join(piece.text for piece in engine.stream(PROMPT, max_tokens=8))
    for after in (0, 1, 3):
        finish, seen = "", 0
        stream = engine.stream(PROMPT, max_tokens=100, ignore_eos=True)
        if after == 0:
            engine.interrupt()
        for piece in stream:
            seen += 1
            finish = piece.finish
            if seen == after:
                engine.interrupt()
        assert finish == "cancelled" and seen <= after + 2
        assert "".join(piece.text for piece in engine.stream(PROMPT, max_tokens=8)) == expected


# --- chat and bench ---------------------------------------------------------------------------------------


def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *argv: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return run(capsys, "chat", "-m", MODEL, "-c", "512", "-n", "16", *argv)


def test_a_conversation_keeps_its_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = chat(
        monkeypatch, capsys, "Say hello.\n\nAgain \\\nplease.\n/undo\nAgain \\\nplease.\n/reset\nSay hello.\n/exit\nx\n"
    )
    answers, figures = out.splitlines(), [line for line in err.splitlines() if line.startswith("prompt")]
    assert len(figures) == 4
    assert "cached" not in figures[0] and "cached" in figures[1]
    assert out.endswith(answers[0] + "\n")  # after /reset the first question gets the first answer
    whole = out.splitlines()
    assert whole.count(answers[0]) == 2


@pytest.mark.usefixtures("loaded")
def test_the_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = chat(monkeypatch, capsys, "Say hello.\nAgain please.\n/undo\nAgain please.\n", "--stop", "\n")
    first, second, third = out.splitlines()
    assert second == third != first


@pytest.mark.usefixtures("loaded")
def test_a_conversation_that_outgrows_the_context_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(("word " * 300 + "\n").encode())))
    _, err = run(capsys, "chat", "-m", MODEL, "-c", "256", status=2)
    assert "the context is 256" in err


@pytest.mark.usefixtures("loaded")
def test_unknown_commands_of_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, "/foo\n/help\n")
    assert out == "" and "no command /foo" in err and "/reset" in err


def test_bench_reports_every_test(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["bench", MODEL, "--prefill", "16", "--depth", "8", "--rows", "3", "-n", "4", "--rounds", "2"]
    report = json.loads(run(capsys, *small, "--json")[0])
    tests = [(t["kind"], t["length"], t["rows"]) for t in report["tests"]]
    assert tests == [("prefill", 16, 1), ("decode", 8, 1), ("decode", 8, 3)]
    assert all(len(t["samples"]) == 2 and min(t["samples"]) > 0 for t in report["tests"])
    assert report["tests"][1]["bandwidth_bytes_per_s"] > 0
    assert "decode at 8, 3 side by side" in bench.shown(report)
    assert "this model takes 2 to 8192" in run(capsys, "bench", MODEL, "--prefill", "9000", status=2)[1]


def test_bench_plans_from_its_options() -> None:
    args = argparse.Namespace(prefill=(1, 2), depth=(3,), rows=(4, 5))
    assert [(t.kind, t.length, t.rows) for t in bench.plan(args)] == [
        ("prefill", 1, 1),
        ("prefill", 2, 1),
        ("decode", 3, 1),
        ("decode", bench.SHORT, 4),
        ("decode", bench.SHORT, 5),
    ]
    make = bench.prompt_maker(1000)
    assert make(8) != make(8) and all(0 <= t < 1000 for t in make(50))
