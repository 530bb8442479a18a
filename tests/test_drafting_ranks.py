"""Drafters over real ranks: the text of one process, guesses that were right and wrong, refusals in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engine import Options, load
from helpers_mpi import generate, mpirun, needs_mpi, tokens_of
from helpers_tiny import tiny_model

pytestmark = needs_mpi

ASKED: dict[str, Any] = {
    "prompts": ["hello world hello world", "abc" * 30, "x"],
    "max_tokens": 24,
    "samplings": [{}, {"temperature": 0.8, "seed": 3}, {"repeat_penalty": 1.3, "top_k": 40, "temperature": 1.0}],
}
TARGET, OTHER, NEAR = "target", "other", "near"
"""Models: the second has nothing to do with the first, the third is the first one's weights in eight bits."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {
        TARGET: tiny_model(folder / "target.gguf", blocks=7, text=True),
        NEAR: tiny_model(folder / "near.gguf", "Q8_0", blocks=7, text=True),
        OTHER: tiny_model(folder / "other.gguf", blocks=2, seed=5, text=True),
    }


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> list[list[list[int]]]:
    with load(models[TARGET], Options(threads=1, context=512)) as engine:
        return tokens_of(engine, ASKED)


def guessed(models: dict[str, Path], ranks: int, drafter: str | list[str], **more: Any) -> dict[str, Any]:
    named = [drafter] if isinstance(drafter, str) else drafter
    options = {"drafter": [str(models.get(name, name)) for name in named], **more}
    return generate(ranks, models[TARGET], **ASKED, options=options)


def test_a_rank_that_drafts(models: dict[str, Path], plain: list[list[list[int]]]) -> None:
    """How far ahead it gets depends on the machine's load, so policies take turns until all that can happen has."""
    wanted = {"launched", "accepted", "cancelled"}
    for more in ({}, {"policy": "pipeinfer", "knobs": {"draft": 3, "np": 2, "pa": 0.0, "ps": 0.05}}, {}):
        answer = guessed(models, 3, NEAR, **more)
        assert answer["tokens"] == plain
        wanted -= {what for what, count in answer["guesses"].items() if count}
        if not wanted:
            break
    assert not wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "drafter", "more"),
    [
        (2, "ngram", {}),
        (2, TARGET, {}),
        (3, ["ngram", OTHER], {}),
        (3, "layers:3", {}),
        (4, TARGET, {"layer_split": "0.3,0.3/0.5,0.5"}),
        (3, TARGET, {"policy": "pipeinfer", "knobs": {"draft": 3, "np": 2, "pa": 0.01}}),
        (3, TARGET, {"policy": "sync", "knobs": {"draft": 3}}),
    ],
    ids=str,
)
def test_more_drafters_and_policies(
    models: dict[str, Path], plain: list[list[list[int]]], ranks: int, drafter: str | list[str], more: dict[str, Any]
) -> None:
    answer = guessed(models, ranks, drafter, **more)
    assert answer["tokens"] == plain
    if drafter == TARGET and not more.get("policy") and not answer["guesses"]["launched"]:
        # Our policy may measure that a draft as slow as the target isn't worth a row; the synchronous one doesn't ask.
        answer = guessed(models, ranks, drafter, **more, policy="sync", knobs={"draft": 3})
        assert answer["tokens"] == plain
    assert answer["guesses"]["launched"] > 0
    if drafter == TARGET:
        assert answer["guesses"]["accepted"] > 0.3 * answer["guesses"]["launched"]


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, "0.5,0.5/0.5,0.5"])
def test_a_draft_for_the_draft(models: dict[str, Path], plain: list[list[list[int]]], split: str | None) -> None:
    """On a rank of its own, or two: the same text. (Which drafts come in time is the machine's luck; that they are the
    same, ``test_speculate_drafters`` shows.)"""
    more: dict[str, Any] = {"policy": "sync", "knobs": {"draft": 5}} | ({"layer_split": split} if split else {})
    said = [guessed(models, 4 if split else 3, NEAR, draft_for_draft=staged, **more) for staged in (None, "ngram")]
    assert said[0]["tokens"] == said[1]["tokens"] == plain
    assert min(each["guesses"]["accepted"] for each in said) > 0


@pytest.mark.slow
def test_refusals(models: dict[str, Path]) -> None:
    draft = ("-md", models[OTHER])
    cases: list[tuple[tuple[object, ...], str]] = [
        ((*draft, "--layer-split", "0.5,0.5"), "has no slash"),
        (("--layer-split", "0.5/1.0"), "there is none"),
        ((*draft, "--layer-split", "0.5,0.5/1.0"), "is for 3 ranks and 2 were started"),
        ((*draft, "--layer-split", "0.7,0.7/1.0"), "shares sum to 1.4"),
        (("--policy", "sync"), "no drafter"),
        (("--draft-ngram", "--draft-for-draft", "ngram"), "no draft to draft for"),
    ]
    for flags, says in cases:
        done = mpirun(2, "-m", "headrace", "run", "-m", models[TARGET], "--raw", *flags, "hi")
        ours = [line for line in done.stderr.splitlines() if line.startswith("headrace:")]
        assert done.returncode == 2 and len(ours) == 1 and says in ours[0], done.stderr
