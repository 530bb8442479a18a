"""Whole batch jobs on a tiny model: every kind of row, and everything that can go wrong around them."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import setup
from headrace.engine import Engine, load
from headrace.errors import BadFile, BadRequest, HeadraceError, Unavailable
from headrace.jobs import rows as rows_module
from headrace.jobs import state as state_module
from headrace.jobs.batch import Batch, Report
from headrace.jobs.state import State
from headrace.memory.stream import Streamed
from headrace.run.types import Sampling
from helpers_chat import END, chat, chat_model, read_rows, row, write_rows

LETTERS = {str(b): 100 for b in b"abcdefghijklmnopqrstuvwxyz"}
MAPS = {"context": 128, "threads": 1, "rows": 16, "caches": 8, "sequences": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("batch") / "tiny.gguf", blocks=2)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load(model, **MAPS) as engine:
        yield engine
        while not engine.parts.loop.idle:
            engine.work()
        assert engine.head.idle and engine.head.check_integrity() == []


def mixed(count: int) -> list[dict[str, Any]]:
    """Rows of many kinds, short ones and long ones."""
    rows = []
    for i in range(count):
        body = {"max_tokens": 1 + i % 9, "temperature": 0 if i % 4 == 0 else 1.0, "logit_bias": LETTERS}
        if i % 5 == 1:
            body |= {"n": 2}
        if i % 7 == 2:
            body |= {"seed": i, "presence_penalty": 0.5}
        rows.append(
            chat(f"c{i}", f"question {i}" * (i % 3 + 1), **body)
            if i % 2
            else row(f"t{i}", {"prompt": f"once {i}", **body})
        )
    return rows


def compute(engine: Engine, folder: Path, rows: list[Any], seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    report = Batch(engine, write_rows(folder / "in.jsonl", rows), out, seed, **settings).run()
    assert (report.rows, report.total) == (len(rows), len(rows)) and not out.with_name("out.jsonl.state").exists()
    found = read_rows(out)
    assert len(found) == len(rows) and report.failed == sum(f["error"] is not None for f in found)
    assert len({f["id"] for f in found}) == len(found)
    return found


def choices(result: dict[str, Any]) -> list[dict[str, Any]]:
    assert result["error"] is None and result["response"]["status_code"] == 200
    return result["response"]["body"]["choices"]


def text(result: dict[str, Any], choice: int = 0) -> str:
    one = choices(result)[choice]
    return one["message"]["content"] if "message" in one else one["text"]


# --- what rows ask for ----------------------------------------------------------------------------------


def test_rows_of_every_kind(engine: Engine, tmp_path: Path) -> None:
    free = {"logit_bias": LETTERS, "max_tokens": 12}
    rows = [
        row("plain", {"prompt": "once", **free}),
        chat("talk", "hello", **free),
        row("three", {"prompt": "once", "n": 3, **free}),
        row("greedy", {"prompt": "once", "temperature": 0, "max_tokens": 8}),
        row("only A", {"prompt": "x", "max_tokens": 5, "temperature": 0, "logit_bias": {"65": 100}}),
        row("ids", {"prompt": [111, 110, 99, 101], "temperature": 0, "max_tokens": 8}),
        row("größe 🎈 日本語", {"prompt": "größe 🎈 日本語", **free}),
        row("ends", {"prompt": "x", "max_tokens": 9, "temperature": 0, "logit_bias": {str(END): 100}}),
        row(
            "goes on",
            {"prompt": "x", "max_tokens": 9, "temperature": 0, "logit_bias": {str(END): 100}, "ignore_eos": True},
        ),
        chat("parts", "", messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}], **free),
        chat("system", "", messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "q"}], **free),
    ]  # fmt: skip
    found = {f["custom_id"]: f for f in compute(engine, tmp_path, rows)}
    assert list(found) == [r["custom_id"] for r in rows]
    assert len(text(found["plain"])) == 12 and text(found["plain"]).isalpha()
    body = found["talk"]["response"]["body"]
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "tiny", 1)
    assert body["choices"][0]["message"]["role"] == "assistant" and body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12
    assert len({text(found["three"], i) for i in range(3)}) == 3
    assert [c["index"] for c in choices(found["three"])] == [0, 1, 2]
    assert found["three"]["response"]["body"]["usage"]["completion_tokens"] == 36
    assert text(found["only A"]) == "AAAAA" and choices(found["only A"])[0]["finish_reason"] == "length"
    assert text(found["ids"]) == text(found["greedy"])
    assert text(found["größe 🎈 日本語"]).isalpha()
    assert text(found["ends"]) == "" and choices(found["ends"])[0]["finish_reason"] == "stop"
    assert choices(found["goes on"])[0]["finish_reason"] == "length"
    assert found["goes on"]["response"]["body"]["usage"]["completion_tokens"] == 9
    greedy = engine.generate(["once"], max_tokens=8, sampling=Sampling())[0]
    assert text(found["greedy"]) == greedy.text
    assert found["plain"]["response"]["body"]["object"] == "text_completion"


def test_a_stop_string_ends_a_row(engine: Engine, tmp_path: Path) -> None:
    body = {"prompt": "once", "max_tokens": 12, "seed": 3, "logit_bias": LETTERS}
    whole = text(compute(engine, tmp_path, [row("a", body)])[0])
    (tmp_path / "out.jsonl").unlink()
    cut = compute(engine, tmp_path, [row("a", {**body, "stop": [whole[5:8], "ZZ"]})])[0]
    assert text(cut) == whole[: whole.index(whole[5:8])]
    assert choices(cut)[0]["finish_reason"] == "stop"


def test_log_probabilities(engine: Engine, tmp_path: Path) -> None:
    free = {"logit_bias": LETTERS, "max_tokens": 6, "temperature": 0}
    rows = [
        chat("chat", "x", logprobs=True, top_logprobs=3, **free),
        chat("none", "x", logprobs=True, **free),
        row("text", {"prompt": "x", "logprobs": 2, **free}),
        row("zero", {"prompt": "x", "logprobs": 0, **free}),
        row("bytes", {"prompt": "x", "logprobs": 5, "max_tokens": 20, "temperature": 2.0}),
    ]
    found = {f["custom_id"]: f for f in compute(engine, tmp_path, rows)}
    content = choices(found["chat"])[0]["logprobs"]["content"]
    assert "".join(c["token"] for c in content) == text(found["chat"])
    for c in content:
        assert bytes(c["bytes"]).decode() == c["token"] and c["logprob"] <= 0
        tops = [t["logprob"] for t in c["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and c["logprob"] <= tops[0]
    assert all(c["top_logprobs"] == [] for c in choices(found["none"])[0]["logprobs"]["content"])
    old = choices(found["text"])[0]["logprobs"]
    assert "".join(old["tokens"]) == text(found["text"]) and old["text_offset"] == list(range(6))
    assert [len(t) for t in old["top_logprobs"]] == [2] * 6
    assert choices(found["zero"])[0]["logprobs"]["top_logprobs"] == [{}] * 6
    raw = choices(found["bytes"])[0]
    assert all(math.isfinite(p) for p in raw["logprobs"]["token_logprobs"])
    assert raw["logprobs"]["text_offset"] == sorted(raw["logprobs"]["text_offset"])
    assert all(len(t) == 5 for t in raw["logprobs"]["top_logprobs"])  # parts of characters don't collide


def test_bad_rows_become_error_rows(engine: Engine, tmp_path: Path) -> None:
    good = {"prompt": "x", "max_tokens": 2}
    rows: list[Any] = [
        row("good", good), "{", "[]", b"\xff", '{"custom_id": "q", "custom_id": "q"}', '{"custom_id": 3}',
        {**row("method", good), "method": "PUT"}, row("url", good, "/v1/x"), {**row("body", good), "body": 3},
        row("field", {**good, "fields": 1}), row("type", {**good, "max_tokens": "2"}),
        row("range", {**good, "top_p": 7}),
        row("empty", {"prompt": ""}), row("id", {"prompt": [288]}), row("negative", {"prompt": [-1]}),
        row("long", {"prompt": "x" * 128}), row("bias", {**good, "logit_bias": {"288": 1}}), row("good", good),
        row("model", {**good, "model": "other"}), row("surrogate", {"prompt": "\ud800"}), row("\udfff", good),
        chat("role", "", messages=[{"role": "king", "content": "x"}]), chat("refused", "refuse me"),
        chat("image", "", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        chat("key", "", messages=[{"role": "user", "content": "x", "\ud83d": 1}]),
        chat("tools", "x", tools=[]), row("last", good),
    ]  # fmt: skip
    found = compute(engine, tmp_path, rows, names=("tiny", "other name"))
    fine = [f["custom_id"] for f in found if f["error"] is None]
    assert fine == ["good", "last"]
    for line, f in enumerate(found):
        if f["error"] is not None:
            assert f["response"] is None and f["error"]["code"] == "invalid_request"
            assert 10 < len(f["error"]["message"]) < 400, line
            wanted = rows[line]["custom_id"] if isinstance(rows[line], dict) else None
            assert f["custom_id"] == wanted or line in (1, 2, 3, 4, 5, 20)
    assert "earlier" in found[17]["error"]["message"] and "any-model" in found[18]["error"]["message"]
    assert "not that" in found[22]["error"]["message"]


def test_a_row_may_name_any_model_when_told_so(engine: Engine, tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 2, "model": "gpt-4o"}
    assert compute(engine, tmp_path, [row("a", body)])[0]["error"] is None


def test_a_model_without_a_template_takes_completions_only(tmp_path: Path, engine: Engine) -> None:
    batch = Batch(engine, write_rows(tmp_path / "in", [chat("a", "x"), row("b", {"prompt": "x"})]), tmp_path / "out")
    batch._start = lambda line, asked: (setattr(batch, "_template", None), Batch._start(batch, line, asked))[1]
    assert batch.run().failed == 1
    assert "/v1/completions" in read_rows(tmp_path / "out")[0]["error"]["message"]


# --- what results depend on -----------------------------------------------------------------------------


def by_name(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {f["custom_id"]: [(text(f, i)) for i in range(len(choices(f)))] for f in found}


def test_order_doesnt_matter_and_seeds_do(engine: Engine, tmp_path: Path) -> None:
    rows = mixed(24)
    first = by_name(compute(engine, tmp_path, rows))
    (tmp_path / "out.jsonl").unlink()
    assert by_name(compute(engine, tmp_path, random.Random(1).sample(rows, len(rows)))) == first
    (tmp_path / "out.jsonl").unlink()
    other = by_name(compute(engine, tmp_path, rows, seed=1))
    for r in rows:
        body = r["body"]
        fixed = "seed" in body or body["temperature"] == 0
        assert (other[r["custom_id"]] == first[r["custom_id"]]) >= fixed
    assert sum(other[k] != first[k] for k in first) > 8


@pytest.fixture(scope="module")
def truth(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """(input, output) of an undisturbed job."""
    folder = tmp_path_factory.mktemp("truth")
    compute(engine, folder, [*mixed(40), "bad", row("last", {"prompt": "x", "max_tokens": 3})])
    return folder / "in.jsonl", (folder / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [{"sequences": 1, "caches": 1}, {"sequences": 64, "caches": 3}, {"rows": 5, "runs": 3}, {"streamed": (1, 2)}],
    ids=str,
)
def test_the_output_is_the_same_however_it_is_computed(
    settings: dict[str, Any], model: Path, truth: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(settings)
    streamed = settings.pop("streamed", ())
    if streamed:
        monkeypatch.setattr(setup, "place", lambda *args: list(streamed))
    with load(model, packs=tmp_path, **{**MAPS, **settings}) as engine:
        report = Batch(engine, truth[0], tmp_path / "out").run()
        assert isinstance(engine.parts.weights, Streamed) == bool(streamed) == (report.streamed_bytes > 0)
        assert (report.disk_bound is not None) == bool(streamed)
    assert (tmp_path / "out").read_bytes() == truth[1]


# --- files ----------------------------------------------------------------------------------------------


def stop_after(rows: int) -> tuple[list[Batch], Callable[[Report], None]]:
    """A ``tell`` that interrupts its job once so many rows are done."""
    batch: list[Batch] = []

    def tell(report: Report) -> None:
        if report.rows >= rows:
            batch[0].interrupt()

    return batch, tell


def interrupted(engine: Engine, source: Path, target: Path, rows: int, **settings: Any) -> None:
    holder, tell = stop_after(rows)
    holder.append(Batch(engine, source, target, tell=tell, **settings))
    with pytest.raises(KeyboardInterrupt):
        holder[0].run()
    assert engine.head.idle and engine.head.check_integrity() == []
    assert all(job.finish for job in engine._jobs.values())
    assert not target.exists()


@pytest.mark.parametrize("rows", [0, 1, 20, 41])
def test_ctrl_c_gives_everything_back_and_the_job_goes_on(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, rows: int
) -> None:
    out = tmp_path / "out"
    interrupted(engine, truth[0], out, rows)
    with State(tmp_path / "out.state") as state:
        assert rows <= state.progress().rows < 42
    report = Batch(engine, truth[0], out).run()
    assert report.resumed >= rows and out.read_bytes() == truth[1]


def test_a_finished_job_is_not_done_again(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Batch(engine, truth[0], out).run()
    again = Batch(engine, truth[0], out).run()
    assert (again.rows, again.failed, again.tokens) == (first.rows, first.failed, 0)
    assert out.read_bytes() == truth[1]
    for other in (Batch(engine, truth[0], out, seed=1), Batch(engine, truth[0], out, names=("tiny",))):
        with pytest.raises(BadRequest, match="there already"):
            other.run()
    assert Batch(engine, truth[0], out, restart=True).run().tokens == first.tokens
    assert out.read_bytes() == truth[1]


@pytest.mark.parametrize("content", [b"", b"notes\n", b'{"id": "x", "error": null}\n', b"[]\n", b"\xff"])
def test_another_file_is_never_overwritten(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, content: bytes
) -> None:
    out = tmp_path / "out"
    out.write_bytes(content)
    with pytest.raises(BadRequest, match="there already"):
        Batch(engine, truth[0], out).run()
    assert out.read_bytes() == content


def test_a_cut_output_is_no_output(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"".join(truth[1].splitlines(keepends=True)[:-1]))
    with pytest.raises(BadRequest, match="there already"):
        Batch(engine, truth[0], tmp_path / "out").run()


def test_the_state_of_another_job_is_refused(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(engine, truth[0], out, 5)
    changed = write_rows(tmp_path / "in", [row("a", {"prompt": "x"})])
    for other, word in (
        (Batch(engine, truth[0], out, seed=1), "seed 0"),
        (Batch(engine, changed, out), "input"),
        (Batch(engine, truth[0], out, names=("tiny",)), "names"),
    ):
        with pytest.raises(BadRequest, match=word):
            other.run()
    assert Batch(engine, changed, out, restart=True).run().total == 1


def test_a_state_in_use_is_left_alone(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "PATIENCE", 0.05)
    with State(tmp_path / "out.state"):
        for restart in (False, True):
            with pytest.raises(BadFile, match="in use"):
                Batch(engine, truth[0], tmp_path / "out", restart=restart).run()


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_the_journal_suits_the_file_system(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "file_system", lambda folder: kind)
    with State(tmp_path / "s") as state:
        mode = state._db.execute("pragma journal_mode").fetchone()[0]
        assert mode == state.journal == ("delete" if kind == "nfs4" else "wal")


def test_what_is_no_state_is_left_alone(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    path = tmp_path / "out.state"
    path.write_text("my notes, " * 1000)
    for restart in (False, True):
        with pytest.raises(BadFile, match="no job's state"):
            Batch(engine, truth[0], tmp_path / "out", restart=restart).run()
    assert path.read_text() == "my notes, " * 1000


def test_paths_that_cant_be(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in", [row("a", {"prompt": "x"})])
    (tmp_path / "empty").write_bytes(b"\n \n")
    for batch, word in (
        (Batch(engine, tmp_path / "none", tmp_path / "out"), "no such batch file"),
        (Batch(engine, tmp_path, tmp_path / "out"), "directory"),
        (Batch(engine, tmp_path / "empty", tmp_path / "out"), "no rows"),
        (Batch(engine, source, tmp_path / "no" / "out"), "no such folder"),
        (Batch(engine, source, tmp_path), "is a folder"),
        (Batch(engine, source, source), "input itself"),
        (Batch(engine, source, source, restart=True), "input itself"),
        (Batch(engine, source, Path("/proc/out")), "writable"),
    ):
        with pytest.raises(HeadraceError, match=word):
            batch.run()
    assert source.exists()


def test_a_huge_line_is_one_bad_row(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE", 2000)
    good = row("a", {"prompt": "x", "max_tokens": 2})
    whole = json.dumps(row("fits", {"prompt": "x", "max_tokens": 2}))
    fits = whole[:-1] + " " * (1999 - len(whole)) + "}"
    rows = [good, json.dumps(row("b", {"prompt": "x" * 9000})), fits, {**good, "custom_id": "c"}]
    found = compute(engine, tmp_path, rows)
    assert [f["error"] is None for f in found] == [True, False, True, True]
    assert "MiB" in found[1]["error"]["message"] and found[1]["custom_id"] is None


def test_an_input_changed_midway_is_noticed(engine: Engine, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in", mixed(30))

    def tell(report: Report) -> None:
        with source.open("ab") as f:
            f.write(b"\n")

    with pytest.raises(BadFile, match="was changed"):
        Batch(engine, source, tmp_path / "out", tell=tell).run()
    assert engine.head.idle and not (tmp_path / "out").exists()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of so many bytes; gives a function that makes it larger."""
    folder.mkdir()

    def mount(*options: str) -> int:
        return subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        pytest.skip("this user may not mount a small disk")
    try:
        yield lambda larger: (mount("-o", f"remount,size={larger}"), None)[1]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", [8 << 10, 48 << 10, 160 << 10])
def test_a_full_disk_ends_the_job_and_loses_nothing(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, size: int
) -> None:
    with small_disk(tmp_path / "disk", size) as grow:
        out = tmp_path / "disk" / "out"
        with pytest.raises((Unavailable, BadFile), match="room"):
            Batch(engine, truth[0], out).run()
        assert not out.exists() and engine.head.idle
        grow(4 << 20)
        Batch(engine, truth[0], out).run()
        assert out.read_bytes() == truth[1]
