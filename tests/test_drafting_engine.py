"""Guessing through the engine: whatever guesses, the text is the plain one; what can't be is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import Engine, Options, load
from headrace.errors import BadFile, BadRequest, OverBudget, Unsupported
from headrace.memory.stream import Streamed
from headrace.planning import PLAIN
from headrace.run.tree import Node
from headrace.run.types import Draft, Sampling
from headrace.speculate import serial
from headrace.speculate.grow import ModelDrafter
from headrace.speculate.serial import Frugal, Rates
from headrace.speculate.sync import Synchronous
from helpers_text import smollm2
from helpers_tiny import tiny_model

PROMPTS = ["hello world hello world hello", "abcabcabcabcabc", "x", "one two three one two"]
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, repeat_penalty=1.2, seed=1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("drafting") / "tiny.gguf", text=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("drafting") / "other.gguf", blocks=2, seed=5, text=True)


def texts(engine: Engine, tokens: int = 40) -> list[list[tuple[int, ...]]]:
    return [
        [done.tokens for done in engine.generate(PROMPTS, max_tokens=tokens, sampling=sampling, ignore_eos=True)]
        for sampling in SAMPLINGS
    ]


def alone(engine: Engine, tokens: int = 40) -> list[list[tuple[int, ...]]]:
    return [
        [engine.generate([p], max_tokens=tokens, sampling=s, ignore_eos=True)[0].tokens for p in PROMPTS]
        for s in SAMPLINGS
    ]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[tuple[int, ...]]]:
    with load(tiny, Options(threads=1, context=256, caches=4)) as engine:
        return texts(engine)


SAME, OTHER = "same", "other"


@pytest.mark.parametrize(
    ("named", "more"),
    [
        (("ngram",), {}),
        ((SAME,), {}),
        ((OTHER,), {}),
        (("layers:2",), {}),
        (("ngram", SAME), {}),
        (("ngram",), {"policy": "sync", "knobs": {"draft": 4}}),
        ((SAME,), {"policy": "sync"}),
        (
            (OTHER,),
            {"policy": "pipeinfer", "knobs": {"draft": 4, "np": 3, "pa": 0.0, "ps": 0.05, "pr": 0.4, "pd": 0.01}},
        ),
        ((SAME,), {"policy": "pipeinfer", "knobs": {"draft": 4, "pa": 0.01}}),
        ((SAME,), {"knobs": {"draft": 3, "np": 2, "pa": 0.2}}),
        ((SAME,), {"draft_for_draft": "ngram"}),
        (("layers:2",), {"draft_for_draft": "ngram", "policy": "pipeinfer", "knobs": {"draft": 4, "np": 3, "pa": 0.0}}),
    ],
    ids=str,
)
def test_the_text_is_the_plain_one(
    tiny: Path, other: Path, plain: list[list[tuple[int, ...]]], named: tuple[str, ...], more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Rows and drafts that cost next to nothing: our policy must not find, on a busy machine, that guessing doesn't pay.
    monkeypatch.setattr(Rates, "__call__", lambda self, rows: 1e-3 + rows * 1e-9)
    monkeypatch.setattr(serial, "START", 1e9)
    monkeypatch.setattr(serial, "MOST", 1e9)
    monkeypatch.setattr(Frugal, "_worth", lambda self, chance: chance * 10)
    drafter = tuple({SAME: tiny, OTHER: other}.get(name, name) for name in named)
    with load(tiny, Options(threads=1, context=256, caches=4, drafter=drafter, **more)) as engine:
        assert texts(engine) == plain
        assert alone(engine) == plain
        assert engine.head.check_integrity() == []
        counts = engine.head.counts
        if SAME in named and more.get("policy") != "pipeinfer":
            assert counts.accepted > 100
        elif "ngram" in named or (more and OTHER in named):
            assert counts.launched > 0


def test_drafters_that_cannot_be_are_refused(tiny: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"drafter": "layers:4"}, BadRequest, "has 4 blocks"),
        ({"drafter": "layers:x"}, BadRequest, "layers:N"),
        ({"drafter": (tiny, "layers:1")}, Unsupported, "One drafter"),
        ({"drafter": "ngram", "policy": "pipeinfer"}, BadRequest, "needs a draft model"),
        ({"drafter": "ngram", "knobs": {"pr": 0.1}}, BadRequest, "-pr has no meaning for the policy 'ours'"),
        ({"drafter": "ngram", "policy": "best"}, BadRequest, "There is no policy 'best'"),
        ({"policy": "sync"}, BadRequest, "no drafter"),
        ({"drafter": "ngram", "draft_for_draft": "ngram"}, BadRequest, "no draft to draft for"),
        ({"drafter": tiny, "draft_for_draft": "magic"}, BadRequest, "'magic' can't draft"),
        ({"drafter": "ngram", "kv_disk": tmp_path}, Unsupported, "whole cache in memory"),
        ({"drafter": tiny, "ram": 60 << 20}, OverBudget, "draft model"),
        ({"drafter": tmp_path / "none.gguf"}, BadFile, "none.gguf"),
    ]
    for options, kind, says in cases:
        with pytest.raises(kind) as told:
            load(tiny, Options(threads=1, context=256, **options))
        assert says in str(told.value)


def test_layers_that_draft_stay_in_memory(tiny: Path, plain: list[list[tuple[int, ...]]], tmp_path: Path) -> None:
    """Whatever a plan says of them; the others stream."""
    places = [PLAIN, *[replace(PLAIN, weights="disk")] * 4, PLAIN]
    more: dict[str, Any] = {"places": tuple(places), "packs": tmp_path, "policy": "sync"}
    with load(tiny, Options(threads=1, context=256, caches=4, drafter="layers:2", **more)) as engine:
        assert isinstance(engine.parts.weights, Streamed)
        assert engine.parts.weights.order == [3, 4]
        assert alone(engine) == plain
        assert engine.head.counts.launched > 0


def test_a_kept_cache_goes_on_with_guesses(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation: each turn continues what was computed, drafters hear the whole text anew."""
    monkeypatch.setattr(serial, "START", 1e9)

    def turns(**more: Any) -> list[str]:
        said, text = [], PROMPTS[0]
        with load(tiny, Options(threads=1, context=512, **more)) as engine:
            for _ in range(3):
                stream = engine.stream(text, max_tokens=20, ignore_eos=True, keep=True)
                said.append("".join(piece.text for piece in stream))
                text += " and so on"
            assert engine.head.check_integrity() == []
        return said

    assert turns(drafter=("ngram", tiny)) == turns()


def drafted(
    model: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, asked: list[str], samplings: Any = SAMPLINGS, **more: Any
) -> Any:
    """(what the head was offered, draft by draft; passes of the draft model)."""
    found: list[Any] = []
    hear = Synchronous.drafted

    def note(self: Synchronous, seq: int, draft: Draft, fresh: list[Node], now: float) -> None:
        found.append((draft.base, draft.guesses))
        hear(self, seq, draft, fresh, now)

    with monkeypatch.context() as patch, load(model, Options(threads=1, context=512, policy="sync", **more)) as engine:
        patch.setattr(Synchronous, "drafted", note)
        for i, text in enumerate(asked):
            engine.generate([text], max_tokens=tokens, sampling=samplings[i % 2], ignore_eos=True)
        drafter = engine.parts.loop.drafter
        assert isinstance(drafter, ModelDrafter)
        return found, drafter._run


def test_a_draft_for_the_draft(tiny: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts, from fewer passes where its text repeats itself: it is made to say but three words."""
    few = tuple((token, 90.0) for token in (40, 41, 42))
    samplings = [Sampling(bias=few), Sampling(bias=few, temperature=0.8, seed=3)]
    for named in (tiny, other, "layers:2"):
        alone, passes = drafted(tiny, monkeypatch, 40, PROMPTS[:2], samplings, drafter=named)
        staged, fewer = drafted(tiny, monkeypatch, 40, PROMPTS[:2], samplings, drafter=named, draft_for_draft="ngram")
        assert staged == alone and fewer < passes, named


@pytest.mark.slow
def test_a_draft_for_the_draft_of_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 drafts for itself; lookup knows much of what it repeats. Which drafts the head sees may differ: one for
    the prompt is ready or not when its pass is."""
    asked = ["The cat sat on the mat. The dog lay on the rug. The cat sat on the mat. The dog lay on the rug. The cat"]
    alone, passes = drafted(smollm2(), monkeypatch, 40, asked, drafter=smollm2())
    staged, fewer = drafted(smollm2(), monkeypatch, 40, asked, drafter=smollm2(), draft_for_draft="ngram")
    both = dict(alone).keys() & dict(staged).keys()
    assert len(both) > 3 and all(dict(staged)[base] == dict(alone)[base] for base in both)
    print(passes, fewer)
    assert fewer < 0.8 * passes
