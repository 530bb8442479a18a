"""Text as it comes: whole characters only, stop strings cut however the pieces fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadRequest
from headrace.text.stream import StopMatcher, Stream
from headrace.text.tokenizer import Tokenizer
from helpers_text import byte_metadata, sentencepiece_metadata

KINDS = {
    "byte": lambda: Tokenizer.from_metadata(byte_metadata()),
    "spm": lambda: Tokenizer.from_metadata(sentencepiece_metadata(True)),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def test_any_ids_stream_to_their_decoding(tokenizer: Tokenizer) -> None:
    @given(st.lists(st.integers(0, tokenizer.size - 1)), st.booleans())
    def check(ids: list[int], special: bool) -> None:
        stream = Stream(tokenizer, special=special, start=True)
        parts = [stream.push(i) for i in ids]
        assert "".join([*parts, stream.flush()]) == tokenizer.decode(ids, special=special)

    check()


def test_no_part_of_a_character(tokenizer: Tokenizer) -> None:
    # SentencePiece writes a space as U+2581, so it can't tell that one from a space.
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
    def check(text: str) -> None:
        stream = Stream(tokenizer)
        shown = ""
        for token in tokenizer.encode(text, add_bos=False):
            part = stream.push(token)
            assert "\ufffd" not in part or "\ufffd" in text
            shown += part
        assert stream.flush() == ""
        assert shown == (" " if tokenizer.vocab.space_prefix and text else "") + text

    check()


def test_a_cut_character_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U000e0067", add_bos=False)  # spelled in bytes
    stream = Stream(tokenizer, start=True)
    assert "".join(map(stream.push, ids[:-1])) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_control_tokens_are_left_out_or_named() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    ids = [tokenizer.vocab.control["<|im_start|>"], *tokenizer.encode("hi"), tokenizer.vocab.control["<|im_end|>"]]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True) == "<|im_start|>hi<|im_end|>"


def test_the_first_space_of_sentencepiece() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(True))
    ids = tokenizer.encode("the  of ", add_bos=False)
    assert tokenizer.decode(ids) == "the  of "
    stream = Stream(tokenizer)  # what goes on after a prompt keeps its space
    assert "".join(map(stream.push, ids)) == " the  of "


def test_stop_strings() -> None:
    matcher = StopMatcher(["\n\nUser:", "END"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("two\n\nUs") == "\ntwo"
    assert matcher.push("e EN") == "\n\nUse "
    assert matcher.matched is None
    assert matcher.push("D and more") == ""
    assert matcher.matched == "END"
    assert matcher.push("more") == ""


def test_what_was_held_back_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.matched is None


def test_no_stops_hold_nothing_and_an_empty_one_is_refused() -> None:
    assert StopMatcher([]).push("text") == "text"
    with pytest.raises(BadRequest, match="empty"):
        StopMatcher(["a", ""])


@given(st.text("abc"), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 3)))
def test_stops_do_not_depend_on_the_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        matcher = StopMatcher(stops)
        shown = "".join(map(matcher.push, pieces))
        assert text.startswith(shown)
        return shown + matcher.flush(), matcher.matched

    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    expected = run(list(text))
    assert run([*pieces, text[at:]]) == expected
    ends = [text.find(s) + len(s) for s in stops if s in text]
    shown, matched = expected
    assert (matched is not None) == bool(ends)
    assert shown + (matched or "") == (text[: min(ends)] if ends else text)
