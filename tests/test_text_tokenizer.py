"""Vocabularies of GGUF files: what they encode to, what they refuse, and that users can't write control tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadFile, BadRequest, Unsupported
from headrace.text.tokenizer import Tokenizer
from helpers_text import byte_metadata, sentencepiece_metadata

KINDS = {
    "byte": byte_metadata,
    "prefix": lambda: sentencepiece_metadata(True),
    "plain": lambda: sentencepiece_metadata(False),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_metadata(KINDS[request.param]())


def hostile(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Texts full of the names of control and user-defined tokens, whole and in pieces."""
    names = [*tokenizer.vocab.control, *tokenizer.vocab.user, "<0x41>", "<", "|", ">", "s", "/", " ", "▁", "im_", "end"]
    return st.lists(st.sampled_from(names) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)).map("".join)


def test_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    control = set(tokenizer.vocab.control.values())

    @given(hostile(tokenizer))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False)
        assert control.isdisjoint(ids)
        assert control.isdisjoint(tokenizer.encode(text, add_bos=False, guard="\ufdd0"))

    check()


def test_round_trip(tokenizer: Tokenizer) -> None:
    """Where a text has no token's name in it: those get a space before what follows (prefix)."""

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text

    check()


def test_control_tokens_count_only_when_asked_for() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    start, end = (tokenizer.vocab.control[n] for n in ("<|im_start|>", "<|im_end|>"))
    text = "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(text, special=True) == [start, *tokenizer.encode("hi"), end]
    plain = tokenizer.encode(text)
    assert start not in plain
    assert tokenizer.decode(plain) == text


def test_a_guarded_name_is_text_and_its_guard_is_gone() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    end = tokenizer.vocab.control["<|im_end|>"]
    ids = tokenizer.encode("a<!|im_end|>b<|im_end|>", special=True, guard="!")
    assert ids == [*tokenizer.encode("a<|im_end|>b"), end]


def test_user_defined_tokens_count_always() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    assert tokenizer.vocab.user["<think>"] in tokenizer.encode("so <think>well")


def test_byte_tokens_are_not_written_by_name() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(False))
    assert tokenizer.decode(tokenizer.encode("<0x41>", add_bos=False)) == "<0x41>"


def test_beginning_of_text() -> None:
    byte, spm = Tokenizer.from_metadata(byte_metadata()), Tokenizer.from_metadata(sentencepiece_metadata(True))
    assert (byte.add_bos, spm.add_bos) == (False, True)
    assert spm.encode("a")[0] == spm.bos == 1
    assert spm.encode("") == [1]
    assert byte.encode("") == []
    assert byte.encode("a", add_bos=True) == [byte.bos, *byte.encode("a")]
    assert spm.encode("<s>a", special=True) == spm.encode("a")  # not twice
    metadata = {k: v for k, v in byte_metadata().items() if not k.endswith("bos_token_id")}
    with pytest.raises(BadRequest, match="no beginning"):
        Tokenizer.from_metadata(metadata).encode("a", add_bos=True)


def test_ends() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata() | {"tokenizer.ggml.eot_token_id": 7})
    assert tokenizer.ends == {tokenizer.vocab.control["<|endoftext|>"], tokenizer.vocab.control["<|im_end|>"], 7}


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    text = "naïve 世界 🙂"
    ids = tokenizer.encode(text, add_bos=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode().removeprefix(" " if tokenizer.vocab.space_prefix else "") == text
    tokenizer.check_model(tokenizer.size + 8)
    assert tokenizer.token_bytes(tokenizer.size + 7) == b""
    assert tokenizer.decode([tokenizer.size]) == ""
    for outside in (-1, tokenizer.size + 8):
        with pytest.raises(BadRequest, match="outside the vocabulary"):
            tokenizer.token_bytes(outside)


def test_a_model_with_fewer_rows_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadFile, match="don't belong together"):
        tokenizer.check_model(tokenizer.size - 1)


def test_missing_bytes_vanish_and_are_told() -> None:
    metadata = dict(byte_metadata())
    letter = "ó"  # byte 0xF3, which begins the code points from U+C0000
    tokens = [t if t != letter else "[gone]" for t in metadata["tokenizer.ggml.tokens"]]
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.vocab.missing == {0xF3}
    assert tokenizer.encode("a\U000e0067b")[1:-1] == Tokenizer.from_metadata(metadata).encode("\U000e0067")[1:]


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model": "t5"}, Unsupported, "'t5'"),
        ({"model": None}, BadFile, "tokenizer.ggml.model"),
        ({"model": 3}, BadFile, "not a str"),
        ({"pre": "gpt-9"}, Unsupported, "'gpt-9'.*llama-bpe"),
        ({"tokens": None}, BadFile, "tokens"),
        ({"tokens": []}, BadFile, "tokens"),
        ({"tokens": "abc"}, BadFile, "tokens"),
        ({"tokens": ["a", b"b"]}, BadFile, "tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, BadFile, "twice"),
        ({"token_type": [1]}, BadFile, "token_type"),
        ({"token_type": "x"}, BadFile, "token_type"),
        ({"merges": None}, BadFile, "merges"),
        ({"merges": [1]}, BadFile, "merges"),
        ({"add_space_prefix": True}, Unsupported, "add_space_prefix"),
        ({"bos_token_id": 10**9}, BadFile, "bos_token_id"),
        ({"eos_token_id": -1}, BadFile, "eos_token_id"),
        ({"eos_token_id": "2"}, BadFile, "eos_token_id"),
        ({"add_bos_token": "yes"}, BadFile, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, BadFile, "add_bos_token"),
    ],
)
def test_bad_byte_level_metadata(change: dict[str, Any], error: type[Exception], match: str) -> None:
    metadata = dict(byte_metadata()) | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(error, match=match):
        Tokenizer.from_metadata({k: v for k, v in metadata.items() if v is not None})


def test_bad_sentencepiece_metadata() -> None:
    good = sentencepiece_metadata(True)
    scores = good["tokenizer.ggml.scores"]
    byte = good["tokenizer.ggml.tokens"].index("<0x41>")
    tokens = list(good["tokenizer.ggml.tokens"])
    tokens[byte] = "<0xZZ>"
    for change, match in (
        ({"scores": None}, "scores"),
        ({"scores": scores[:-1]}, "scores"),
        ({"scores": np.full(len(scores), np.nan)}, "no number"),
        ({"scores": ["x"] * len(scores)}, "no number"),
        ({"tokens": tokens}, "byte token"),
    ):
        with pytest.raises(BadFile, match=match):
            Tokenizer.from_metadata(good | {f"tokenizer.ggml.{k}": v for k, v in change.items()})


def test_a_long_word_and_a_long_text() -> None:
    """One word of 100,000 letters is a queue, not a square."""
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    for text in ("ab" * 50_000, "the of and " * 9_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
