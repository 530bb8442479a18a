"""Whole batch jobs on a tiny model: every kind of row, and what results depend on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import setup
from headrace.engine import Engine, load
from headrace.jobs.batch import Batch
from headrace.memory.stream import Streamed
from headrace.run.types import Sampling
from helpers_chat import END, LETTERS, SMALL, chat, chat_model, compute, mixed, read_rows, row, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("batch") / "tiny.gguf", blocks=2)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load(model, **SMALL) as engine:
        yield engine
        while not engine.parts.loop.idle:
            engine.work()
        assert engine.head.idle and engine.head.check_integrity() == []


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
    [
        {"sequences": 1, "caches": 1},
        {"sequences": 64, "caches": 3},
        {"rows": 5, "runs": 3},
        {"streamed": (1, 2)},
        {"kv": 1},
    ],
    ids=str,
)
def test_the_output_is_the_same_however_it_is_computed(
    settings: dict[str, Any], model: Path, truth: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(settings)
    streamed = settings.pop("streamed", ())
    if settings.pop("kv", 0):
        settings |= {"kv_disk": tmp_path, "kv_frames": 20, "rows": 1}
    if streamed:
        monkeypatch.setattr(setup, "place", lambda *args, **more: list(streamed))
    with load(model, packs=tmp_path, **{**SMALL, **settings}) as engine:
        report = Batch(engine, truth[0], tmp_path / "out").run()
        assert isinstance(engine.parts.weights, Streamed) == bool(streamed)
        disk = bool(streamed) or "kv_disk" in settings
        assert (report.streamed_bytes > 0) == disk == (report.disk_bound is not None)
    assert (tmp_path / "out").read_bytes() == truth[1]
