"""A drafter with another vocabulary: mapped where texts agree, refused where too few do."""

from __future__ import annotations

import pytest

from headrace.errors import Unsupported
from headrace.run.types import Committed, Draft
from headrace.speculate.drafters import NGram
from headrace.speculate.vocab import Translated, VocabMap

TARGET = [None, b"a", b"b", b"c", b"ab", b" the", b"cat", b"x"]
DRAFT = [b" the", b"c", b"a", b"t", b"b", None, b"cat", b"only here"]


def test_ids_are_mapped_where_texts_agree() -> None:
    words = VocabMap(TARGET, DRAFT)
    assert words.overlap == pytest.approx(5 / 7)
    assert [words.encode(t) for t in (1, 4, 5, 6)] == [[2], [2, 4], [0], [6]]
    assert words.encode(0) == [] and words.encode(7) == []
    assert words.to_target == [5, 3, 1, -1, 2, -1, 6, -1]


def test_too_little_in_common_is_refused() -> None:
    with pytest.raises(Unsupported, match="29%"):
        VocabMap(TARGET, [b"a", b"b"])


def test_a_translated_drafter_speaks_the_targets_ids() -> None:
    drafter = Translated(NGram(depth=3, branches=1), VocabMap(TARGET, DRAFT))
    (draft,) = drafter.on_event(Committed(0, 0, (5, 6, 1, 2, 3, 5, 6)), 0.0)
    assert isinstance(draft, Draft)
    assert draft.base == 7 and draft.tail == (2, 3, 5, 6)
    assert [(g.token, g.parent) for g in draft.guesses] == [(1, -1), (2, 0), (3, 1)]
    (draft,) = drafter.on_event(Committed(0, 7, (4,)), 0.0)  # "ab" is two tokens there
    assert isinstance(draft, Draft) and draft.base == 8 and draft.tail[-1] == 4
    assert [g.token for g in draft.guesses] == [3, 5, 6]
    assert drafter.on_event(Committed(0, 8, (), over=True), 0.0) == []


def test_guesses_without_a_counterpart_are_left_out_with_what_stands_on_them() -> None:
    drafter = Translated(NGram(depth=3, branches=1), VocabMap([b"", b"a", b"b"], [b"a", b"b", b"z"]))
    inner = drafter.drafter
    assert isinstance(inner, NGram)
    drafter._heard(Committed(0, 0, (1, 2)))
    inner.on_event(Committed(0, 0, (0, 2, 1, 0)), 0.0)
    drafter._known[0].lengths[4] = 2
    said = drafter._said(inner._draft(0, inner._texts[0]), drafter._known[0])
    assert said.guesses == ()
