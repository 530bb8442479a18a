"""Messages as bytes: what is packed comes back, and no bytes whatever do harm."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.message import Limits, Message, pack, unpack
from headrace.cluster.wire import HEADER, MAGIC, MOST
from headrace.errors import BadMessage
from headrace.run.types import (
    PROTOCOL,
    Append,
    Cancel,
    Choice,
    Committed,
    Draft,
    Fork,
    Free,
    Guess,
    Params,
    Passed,
    Result,
    Row,
    RunMessage,
    Sampling,
)

small = st.integers(0, 5000)
i31 = st.integers(0, 2**31 - 1)
seqs = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
mild = st.floats(-1e38, 1e38)
chance = st.floats(0, 1)
samplings = st.builds(
    Sampling,
    temperature=mild,
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=chance,
    repeat_penalty=st.floats(0, 100, exclude_min=True),
    repeat_last_n=st.integers(-1, 2**40),
    frequency_penalty=mild,
    presence_penalty=mild,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(-(2**63), 2**63 - 1),
    bias=st.lists(st.tuples(i31, finite), max_size=3).map(tuple),
    logprobs=st.integers(0, 20),
)


@st.composite
def appends(draw: st.DrawFn) -> Append:
    pairs = draw(st.lists(st.tuples(i31, i31), max_size=5))
    return Append(draw(seqs), tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


ops = st.one_of(
    appends(),
    st.builds(Fork, seqs, seqs, st.integers(0, 2**32 - 1)),
    st.builds(Free, seqs),
    st.builds(Params, seqs, samplings),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    guess = draw(st.booleans())
    ancestors = tuple(draw(st.lists(i31, max_size=4))) if guess else ()
    position = draw(st.integers(len(ancestors), 2**31 - 1))
    return Row(draw(seqs), position, draw(i31), draw(i31), draw(st.booleans()), guess, ancestors)


@st.composite
def runs(draw: st.DrawFn) -> RunMessage:
    some = tuple(draw(st.lists(rows(), max_size=4)))
    live = None
    if draw(st.booleans()):
        live = np.asarray([i for i in range(len(some)) if draw(st.booleans())], np.int32)
    count = len(some) if live is None else len(live)
    x = None
    if count and draw(st.booleans()):
        width = draw(st.integers(1, 9))
        x = np.frombuffer(draw(st.binary(min_size=4 * count * width, max_size=4 * count * width)), np.float32)
        x = x.reshape(count, width)
    epoch, run = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**64 - 1))
    return RunMessage(epoch, run, draw(st.booleans()), tuple(draw(st.lists(ops, max_size=3))), some, live, x)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    ranks = st.integers(0, 2**16 - 1)
    guesses = tuple(
        Guess(draw(i31), draw(st.integers(-1, i - 1)), draw(chance), draw(ranks), draw(ranks))
        for i in range(draw(st.integers(0, 5)))
    )
    return Draft(draw(seqs), draw(i31), tuple(draw(st.lists(i31, max_size=3))), guesses, draw(st.booleans()))


tops = st.lists(st.tuples(i31, finite), max_size=3).map(tuple)
choices = st.builds(Choice, i31, st.integers(-1, 2**31 - 1), st.floats(allow_nan=False), tops)
messages = st.one_of(
    runs(),
    drafts(),
    st.builds(Cancel, st.integers(0, 2**32 - 1), seqs, st.frozensets(i31, max_size=5)),
    st.builds(Result, st.integers(0, 2**32 - 1), seqs, st.lists(choices, max_size=4).map(tuple)),
    st.builds(Passed, seqs),
    st.builds(Committed, seqs, i31, st.lists(i31, max_size=5).map(tuple), st.booleans(), st.none() | samplings),
)


def same(a: Message, b: Message) -> bool:
    """Equality that looks into arrays, bit for bit."""
    if isinstance(a, RunMessage) and isinstance(b, RunMessage):
        return replace(a, live=None, x=None) == replace(b, live=None, x=None) and all(
            one is other if one is None or other is None else _bits(one) == _bits(other)
            for one, other in ((a.live, b.live), (a.x, b.x))
        )
    return type(a) is type(b) and a == b


def _bits(array: np.ndarray) -> tuple[object, ...]:
    return array.shape, array.dtype, array.tobytes()


@given(messages)
def test_round_trip(message: Message) -> None:
    data = pack(message)
    assert same(unpack(data), message)
    assert pack(unpack(data)) == data, "one message has one form"


@given(messages, st.data())
@settings(max_examples=300)
def test_mutated_bytes_are_refused_or_are_another_message(message: Message, data: st.DataObject) -> None:
    raw = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = unpack(raw)
    except BadMessage:
        return
    assert pack(found) == bytes(raw)


def test_each_byte_of_each_kind_changed() -> None:
    """A flag byte of 2 once read as true and went out again as 1: no byte may have two readings."""
    x = np.ones((2, 3), np.float32)
    rows = (Row(3, 5, 7, 2, True, True, (1, 2)), Row(3, 6, 8, 3, False, False, ()))
    made: list[Message] = [
        RunMessage(
            1, 2, True, (Append(3, (1, 2), (7, 8)), Fork(4, 3, 1), Free(4), Params(3, Sampling())), rows, None, x
        ),
        RunMessage(1, 2, False, (), rows, np.asarray([1], np.int32), x[:1]),
        Draft(3, 5, (7,), (Guess(7, -1, 0.5, 1, 0), Guess(8, 0, 0.5, 2, 1)), True),
        Draft(3, 5, (), (), False),
        Cancel(1, 2, frozenset((1, 3))),
        Result(1, 2, (Choice(0, 7, -0.5, ((7, -0.5),)),)),
        Passed(9),
        Committed(3, 5, (7, 8), True, Sampling()),
        Committed(3, 5, (7, 8), False, None),
    ]
    refused = 0
    for raw in map(pack, made):
        for at in range(len(raw)):
            for value in {0, 1, 2, 3, 4, 8, 127, 128, 255, raw[at] ^ 1} - {raw[at]}:
                wrong = bytearray(raw)
                wrong[at] = value
                try:
                    assert pack(unpack(wrong)) == wrong, f"byte {at} of {raw!r} set to {value}"
                except BadMessage:
                    refused += 1
    assert refused > 500


@given(messages, st.data())
def test_cut_or_longer_bytes_are_refused(message: Message, data: st.DataObject) -> None:
    raw = pack(message)
    for wrong in (raw[: data.draw(st.integers(0, len(raw) - 1))], raw + b"\0"):
        with pytest.raises(BadMessage):
            unpack(wrong)
        # A peer that lies about the length as well.
        if len(wrong) >= HEADER.size:
            magic, version, kind, _ = HEADER.unpack_from(wrong)
            with pytest.raises(BadMessage):
                unpack(HEADER.pack(magic, version, kind, len(wrong)) + wrong[HEADER.size :])


@given(st.binary(max_size=200), st.integers(0, 8))
@settings(max_examples=300)
def test_random_bodies(body: bytes, kind: int) -> None:
    raw = HEADER.pack(MAGIC, PROTOCOL, kind, HEADER.size + len(body)) + body
    with contextlib.suppress(BadMessage):
        assert pack(unpack(raw)) == raw


def test_huge_counts_allocate_nothing() -> None:
    """Every u32 of every kind of message set to 2^32 - 1: refused, with no memory taken for it."""
    x = np.ones((2, 3), np.float32)
    two = (Row(1, 5, 2, 3, True), Row(1, 6, 2, 4, True, True, (3,)))
    some: list[Message] = [
        RunMessage(1, 2, False, (Append(1, (2,), (3,)), Params(1, Sampling(bias=((1, 2.0),)))), two, None, x),
        Cancel(1, 2, frozenset({1})),
        Result(1, 2, (Choice(0, 1, 0.5, ((1, 2.0),)),)),
        Draft(1, 2, (3,), (Guess(1, -1, 0.5),)),
        Committed(1, 0, (1, 2), sampling=Sampling()),
    ]
    tracemalloc.start()
    try:
        for message in some:
            raw = pack(message)
            for at in range(HEADER.size, len(raw) - 3):
                bad = bytearray(raw)
                struct.pack_into("<I", bad, at, 0xFFFFFFFF)
                try:
                    unpack(bad)
                except BadMessage:
                    continue
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_limits_of_the_receiver() -> None:
    """What would index past a model's tables never reaches them."""
    limits = Limits(vocab=100, slots=64, width=4)
    x = np.zeros((1, 4), np.float32)
    row = Row(1, 5, 99, 63, True)
    good = RunMessage(0, 1, False, (Append(1, (63,), (99,)),), (row,), None, x)
    assert same(unpack(pack(good), limits), good)
    wrong = [
        replace(good, rows=(replace(row, token=100),)),
        replace(good, rows=(replace(row, slot=64),)),
        replace(good, rows=(replace(row, guess=True, ancestors=(64,)),)),
        replace(good, ops=(Append(1, (64,), (99,)),)),
        replace(good, ops=(Append(1, (63,), (100,)),)),
        replace(good, x=np.zeros((1, 5), np.float32)),
        replace(good, x=None),
        Result(0, 1, (Choice(0, 100),)),
        Draft(1, 0, (), (Guess(100, -1, 0.5),)),
        Committed(1, 0, (100,)),
    ]
    for message in wrong:
        unpack(pack(message))
        with pytest.raises(BadMessage):
            unpack(pack(message), limits)
    tombstone = RunMessage(0, 1, False, (), (row,), np.empty(0, np.int32), None)
    assert same(unpack(pack(tombstone), limits), tombstone)
    first = Limits(width=0)
    assert same(unpack(pack(replace(good, x=None)), first), replace(good, x=None))
    with pytest.raises(BadMessage):
        unpack(pack(good), first)


def test_other_versions_and_programs_are_named() -> None:
    raw = bytearray(pack(Passed(1)))
    raw[2] += 1
    with pytest.raises(BadMessage, match=f"version {PROTOCOL + 1}.*version {PROTOCOL}.*same Headrace"):
        unpack(raw)
    with pytest.raises(BadMessage, match="no message of Headrace"):
        unpack(b"\x80\x04\x95" + bytes(20))  # a pickle
    with pytest.raises(BadMessage, match="over the limit"):
        pack(RunMessage(0, 1, False, (), (Row(0, 0, 0, 0, True),), None, np.empty((1, MOST // 4), np.float32)))


def test_activations_are_a_private_view() -> None:
    """The receiver computes in the message's own memory: nothing else holds it, nothing is copied."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows_ = (Row(0, 0, 0, 0, False), Row(0, 1, 0, 1, True))
    raw = bytearray(pack(RunMessage(0, 1, False, (), rows_, None, x)))
    message = unpack(raw)
    assert isinstance(message, RunMessage) and message.x is not None
    message.x[:] += 1
    assert np.frombuffer(raw[-24:], np.float32).tolist() == [1, 2, 3, 4, 5, 6]
    assert x[0, 0] == 0


def test_overhead_of_a_decode_message() -> None:
    """Bytes beside the activations: under a tenth of them from a width of 300 on, over a hundred guesses too."""
    x = np.zeros((1, 576), np.float32)
    one = RunMessage(0, 1, False, (Append(1, (5,), (9,)),), (Row(1, 5, 9, 5, True),), None, x)
    assert len(pack(one)) - x.nbytes < 120
    chain = tuple(Row(1, 5 + i, 9, i, True, True, tuple(range(i))) for i in range(16))
    guesses = RunMessage(0, 1, False, (), chain, None, np.zeros((16, 576), np.float32))
    assert len(pack(guesses)) < 1.1 * 16 * x.nbytes
