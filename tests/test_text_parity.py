"""Our ids against llama.cpp's, on real prompts and on random Unicode; and against SentencePiece's own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.formats.index import open_model
from headrace.text.kinds import PRE_KINDS
from headrace.text.tokenizer import Tokenizer
from helpers_text import (
    SPEC_BENCH,
    Llama,
    gemma,
    sentencepiece_metadata,
    sentencepiece_model,
    small_model,
    smollm2,
)
from helpers_text_strings import random_text


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Llama]:
    path = smollm2() if request.param == "smollm2" else gemma(tmp_path_factory.mktemp("gemma"))
    return Tokenizer.from_metadata(open_model(path).metadata), Llama(path)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from strings(v)


def differing(pair: tuple[Tokenizer, Llama], count: int, seed: int) -> list[str]:
    """Of ``count`` random texts, those with other ids; in every second one control tokens count."""
    tokenizer, llama = pair
    r = random.Random(seed)
    texts = [(random_text(r), bool(i % 2)) for i in range(count)]
    return [
        t for t, special in texts if tokenizer.encode(t, special=special, add_bos=False) != llama.encode(t, special)
    ]


@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="needs ../shared/data")
def test_every_prompt_of_spec_bench(pair: tuple[Tokenizer, Llama]) -> None:
    tokenizer, llama = pair
    texts = {t for line in SPEC_BENCH.open() for t in strings(json.loads(line))}
    assert len(texts) > 240
    for text in texts:
        assert tokenizer.encode(text) == llama.encode(text, add_bos=True)


def test_random_unicode(pair: tuple[Tokenizer, Llama]) -> None:
    assert differing(pair, 500, seed=1) == []


@pytest.mark.slow
def test_ten_thousand_random_strings(pair: tuple[Tokenizer, Llama]) -> None:
    assert differing(pair, 10_000, seed=2) == []


def test_the_one_known_difference(pair: tuple[Tokenizer, Llama]) -> None:
    """llama.cpp takes any token named </s> for an end of text; in Gemma it is HTML, and we read the file's type."""
    tokenizer, llama = pair
    token = tokenizer.vocab.user.get("</s>")
    ours, theirs = tokenizer.encode("a</s>b", add_bos=False), llama.encode("a</s>b")
    if token is None:
        assert ours == theirs
    else:
        assert token in ours
        assert token not in theirs
        assert ours == llama.encode("a</s>b", special=True)


QUICK = ["default", "llama-bpe"]
ONE_OF_EACH = list({kind: name for name, kind in reversed(PRE_KINDS.items())}.values())


@pytest.mark.parametrize(
    "pre",
    [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in dict.fromkeys([*QUICK, *ONE_OF_EACH])],
)
def test_every_kind_of_word(pre: str, tmp_path: Path) -> None:
    """SmolLM2's vocabulary in a file that names another kind of words."""
    metadata = {**open_model(smollm2()).metadata, "tokenizer.ggml.pre": pre}
    pair = Tokenizer.from_metadata(metadata), Llama(small_model(tmp_path / "model.gguf", metadata))
    assert differing(pair, 300, seed=3) == []


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(prefix)
    tokenizer = Tokenizer.from_metadata(metadata)
    pair = tokenizer, Llama(small_model(tmp_path / "model.gguf", metadata))
    assert differing(pair, 500, seed=4) == []
    assert tokenizer.encode("<mask> a<x> b") == pair[1].encode("<mask> a<x> b", add_bos=True)
    r = random.Random(5)
    for text in (random_text(r) for _ in range(500)) if prefix else ():
        if "<" not in text and "▁" not in text:  # SentencePiece itself reads these as its own
            assert tokenizer.encode(text, add_bos=False) == sentencepiece_model().encode(text)
