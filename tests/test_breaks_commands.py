"""Commands given files and flags that can't be: one sentence, before anything long, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.generation import write_file
from headrace.cli.main import main
from headrace.errors import BadFile, BadRequest, Unavailable
from headrace.plan.plan import Place, Plan
from headrace.simulate.files import by_count, load_cluster, load_ranks
from helpers_tiny import tiny_model
from test_plan_real import a_machine

PLAIN = Place("host", "host", "host", "host")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a machine, a plan for it and one for another model."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "t.gguf", text=True)
    Path("m.json").write_text(a_machine().to_json())
    for name, layers in (("p.json", 6), ("other.json", 9)):
        plan = Plan("t", "m", 1, 1, 32, (PLAIN,) * layers, "host", most=32, slots=128)
        Path(name).write_text(plan.to_json())
    Path("junk").write_bytes(b"\x80\xff")
    Path("deep").write_text("[" * 100_000)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan t.gguf --gen-len 100000", "don't fit into the context of 2048"),
        ("plan t.gguf -c 64 --prompt-len 60 --gen-len 5", "don't fit into the context of 64"),
        ("plan t.gguf --machine m.json --probe", "leave one out"),
        ("plan t.gguf --machine m.json -o no/plan", "no such folder for the plan"),
        ("plan t.gguf --machine m.json -o .", "is a folder"),
        ("plan t.gguf --machine junk", "no machine's file"),
        ("plan t.gguf --machine deep", "no JSON"),
        ("plan t.gguf --machine /dev/zero", "no regular file"),
        ("run -m t.gguf a -n 2 --machine m.json", "--machine is for"),
        ("run -m t.gguf a -n 2 --machine m.json --ram 1G --draft-ngram", "--machine is for"),
        ("run -m t.gguf a -n 2 --plan junk", "no plan"),
        ("run -m t.gguf a -n 2 --plan deep", "no plan"),
        ("run -m t.gguf a -n 2 --plan m.json", "places"),
        ("run -m t.gguf a -n 2 --plan /dev/zero", "no regular file"),
        ("run -m t.gguf a -n 2 --plan other.json", "places 9 layers and the model has 6"),
        ("run -m t.gguf a -n 2 --plan p.json --kv-disk .", "says where the cache is"),
        ("batch in.jsonl -o out.jsonl -m t.gguf --plan p.json --rows 4 --runs 2", "says how many rows and runs"),
        ("run -m t.gguf a -n 2 --trace .", "is a folder"),
        ("run -m t.gguf a -n 2 --trace no/trace", "no such folder for the trace"),
        ("simulate deep --model 70B --policy plain", "TOML"),
        ("simulate junk --model 70B --policy plain", "no cluster file"),
        ("simulate m.json --model 0B --policy plain", "can't be simulated"),
        ("simulate m.json --model 999999999999999999B --policy plain", "can't be simulated"),
        ("simulate m.json --model 70B --policy plain --seed 3", "--seed is for"),
        ("simulate m.json --model 70B --acceptance m.json --seed 3", "--seed is for"),
        ("simulate m.json --model 70B --policy plain --trace no/t", "no such folder for the trace"),
        ("simulate m.json --model 70B --policy plain --timeline no/t.svg", "no such folder for the timeline"),
    ],
)
def test_what_cant_be_is_one_sentence(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("headrace: ") and err.count("\n") == 1 and not out


@pytest.mark.parametrize("more", [["--json"], []])
def test_an_answer_is_there_when_its_trace_cant_be(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", "-m", "t.gguf", "--raw", "abc", "-n", "4", "--ignore-eos", *more]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert main([*line, "--trace", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "/dev/full: can't be written (No space" in err
    assert (json.loads(out)["text"] == json.loads(text)["text"]) if more else out == text


def test_what_was_there_stays_when_a_file_cant_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    file = here / "plan.json"
    write_file(file, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match=r"plan\.json: can't be written \(No space"):
        write_file(file, "new")
    assert file.read_text() == "old" and not list(here.glob(".plan*"))


CLUSTER = {"nodes": "3", "rate": "1e11", "draft_rate": "1e9", "width": "64", "draft_layers": "2", "curve": '"cpu"'}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("nodes", v) for v in ("0", "-1", "true", "1.5", str(10**40), "5000")],
        *[("rate", v) for v in ("0", "nan", "inf", "1e-320", "1e300", "[]", "[1e9, nan, 1]", "['x', 1, 1]")],
        *[("draft_rate", v) for v in ("0", "nan", "-inf", "1e-320", "'x'")],
        *[("width", v) for v in ("0", str(10**40), "1.5")],
        *[("draft_layers", v) for v in ("0", str(10**40), "200000")],
        *[("curve", v) for v in ("[]", "[[1, 1.0], [4, inf]]", "[[1, 1.0], [4, nan]]", "[[1, 1.0]]", "'x'", "[[]]")],
        *[("link", v) for v in ("{rate=nan}", "{rate=1e-320}", "{latency=nan}", "{latency=inf}", "{stall=2}", "{x=1}")],
    ],
)  # fmt: skip
def test_no_number_of_a_cluster_may_be_what_time_cant_be_reckoned_with(here: Path, field: str, value: str) -> None:
    file = here / "c.toml"
    model, draft = by_count("7B", 4.5), by_count("100M", 4.5)
    for lines in (CLUSTER, CLUSTER | {field: value.replace("'", '"')}):
        file.write_text("\n".join(f"{k} = {v}" for k, v in lines.items()))
        if lines is CLUSTER:
            load_cluster(file, model, draft)
            continue
        with pytest.raises(BadFile) as error:
            load_cluster(file, model, draft)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "<html>", "[" * 100_000, '{"ranks": [], "probabilities": []}',
        '{"ranks": "ab", "probabilities": "ab"}',
        *[f'{{"ranks": [{r}], "probabilities": [[{p}]]}}' for r, p in (
            ("NaN", 1), ("1e999", 1), (-7, 0.5), (1, 0.5), (0, "NaN"), (0, "Infinity"), (0, -5), (0, 1e308), (0, "[]"),
        )],
    ],
)  # fmt: skip
def test_a_recording_that_is_none_is_refused(here: Path, text: str) -> None:
    (here / "pair.json").write_text(text)
    with pytest.raises(BadFile, match=r"pair\.json"):
        load_ranks(str(here / "pair.json"), 0)


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "1.1"])
def test_an_acceptance_is_a_share(text: str) -> None:
    with pytest.raises(BadRequest, match="share"):
        load_ranks(text, 0)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_too_little_memory_is_called_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("headrace.cli.inspect.run", run)
    assert main(["inspect", "t.gguf"]) == 2
    err = capsys.readouterr().err
    assert "memory isn't enough" in err and err.count("\n") == 1


def test_the_log_of_flexgen_is_looked_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flexgen", "--model", "t.gguf", "--device", "cpu", "--log-file", "no/log"]) == 2
    assert "no such folder for the log" in capsys.readouterr().err


def test_an_output_that_has_no_such_character_gets_its_escape(here: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "headrace", "run", "-m", "t.gguf", "--raw", "-n", "40", "--ignore-eos", "hi"]
    done = subprocess.run(line, cwd=here, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"\\ufffd" in done.stdout


def test_a_cache_that_is_a_file_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "junk")
    assert main(["cache"]) == 2
    assert "HEADRACE_CACHE names" in capsys.readouterr().err
