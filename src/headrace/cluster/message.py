"""Messages of the loop as bytes: typed, bounded, versioned, little-endian; activations are raw f32.

Columns (all sequences, all positions, ...) rather than records, so that one call packs them all. Numbers are
unsigned wherever a negative one would be wrong, so that one comparison checks a column.

A run (``run/types.py`` says what the fields mean; u: unsigned, i: signed, f: float, and the number of bits):
  header; u32 epoch, u64 run, u8 flags (1 more, 2 live rows are listed, 4 activations), u32 operations, rows,
  ancestors, live rows, width; the operations; columns u64 sequence, u32 position, token, slot, u8 flags
  (1 wanted, 2 guess), u16 ancestors of each row, u32 ancestors of all; u32 live rows; zeros to 8; f32 activations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from headrace.cluster.wire import HEADER, Data, Reader, below, open_message, with_header
from headrace.errors import BadMessage, BadRequest
from headrace.run.types import (
    PROTOCOL,
    Append,
    CacheOp,
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

Message: TypeAlias = RunMessage | Cancel | Result | Passed | Draft | Committed

RUN, CANCEL, RESULT, PASSED, DRAFT, COMMITTED = range(1, 7)
APPEND, FORK, FREE, PARAMS = range(1, 5)

_RUN = struct.Struct("<IQBIIIII")
_CANCEL = struct.Struct("<IQI")
_RESULT = struct.Struct("<IQII")
_PASSED = struct.Struct("<Q")
_DRAFT = struct.Struct("<QIIIB")
_COMMITTED = struct.Struct("<QIIB")
_KIND = struct.Struct("<B")
_APPEND_BODY = struct.Struct("<QI")
_FORK = struct.Struct("<BQQI")
_FORK_BODY = struct.Struct("<QQI")
_SEQ = struct.Struct("<BQ")
_SEQ_BODY = struct.Struct("<Q")
_SAMPLING = struct.Struct("<dqdddqddQqHI")


@dataclass(frozen=True)
class Limits:
    """What a receiver can use. vocab: token ids; slots: of its cache; width: f32 values of a row's activations.

    width 0: a first stage, which gets none; else every live row comes with some. None: nothing is asked.
    """

    vocab: int = 1 << 31
    slots: int = 1 << 31
    width: int | None = None


# --- packing --------------------------------------------------------------------------------------------


def pack(message: Message) -> bytearray:
    """A message as bytes; ``unpack`` gives it back."""
    kind, parts = _PACK[type(message)](message)
    return with_header(kind, PROTOCOL, parts)


def _run(message: RunMessage) -> tuple[int, list[Data]]:
    rows, live, x = message.rows, message.live, message.x
    flags = message.more | (live is not None) << 1 | (x is not None) << 2
    ancestors = [slot for row in rows for slot in row.ancestors]
    n, total = len(rows), len(ancestors)
    listed = [] if live is None else live.tolist()
    width = 0 if x is None else x.shape[1]
    parts: list[Data] = [
        _RUN.pack(message.epoch, message.run, flags, len(message.ops), n, total, len(listed), width),
        *map(_op, message.ops),
        struct.pack(
            f"<{n}Q{n}I{n}I{n}I{n}B{n}H{total + len(listed)}I",
            *[r.seq for r in rows],
            *[r.position for r in rows],
            *[r.token for r in rows],
            *[r.slot for r in rows],
            *[r.wanted | r.guess << 1 for r in rows],
            *[len(r.ancestors) for r in rows],
            *ancestors,
            *listed,
        ),
    ]
    if x is not None:
        parts.append(bytes(-(HEADER.size + sum(map(len, parts))) % 8))
        parts.append(np.ascontiguousarray(x, np.float32).data.cast("B"))
    return RUN, parts


def _op(op: CacheOp) -> bytes:
    if isinstance(op, Append):
        n = len(op.slots)
        return struct.pack(f"<BQI{2 * n}I", APPEND, op.seq, n, *op.slots, *op.tokens)
    if isinstance(op, Fork):
        return _FORK.pack(FORK, op.seq, op.source, op.length)
    if isinstance(op, Free):
        return _SEQ.pack(FREE, op.seq)
    return _SEQ.pack(PARAMS, op.seq) + _sampling(op.sampling)


def _sampling(s: Sampling) -> bytes:
    n = len(s.bias)
    fixed = _SAMPLING.pack(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repeat_penalty, s.repeat_last_n, s.frequency_penalty,
        s.presence_penalty, s.seed, s.choice, s.logprobs, n,
    )  # fmt: skip
    return fixed + struct.pack(f"<{n}I{n}d", *[t for t, _ in s.bias], *[b for _, b in s.bias])


def _cancel(message: Cancel) -> tuple[int, list[Data]]:
    rows = sorted(message.rows)
    return CANCEL, [_CANCEL.pack(message.epoch, message.run, len(rows)), struct.pack(f"<{len(rows)}I", *rows)]


def _result(message: Result) -> tuple[int, list[Data]]:
    choices = message.choices
    n, top = len(choices), [pair for c in choices for pair in c.top]
    body = struct.pack(
        f"<{n}I{n}i{n}d{n}B{len(top)}I{len(top)}d",
        *[c.row for c in choices],
        *[c.token for c in choices],
        *[c.logprob for c in choices],
        *[len(c.top) for c in choices],
        *[token for token, _ in top],
        *[value for _, value in top],
    )
    return RESULT, [_RESULT.pack(message.epoch, message.run, n, len(top)), body]


def _passed(message: Passed) -> tuple[int, list[Data]]:
    return PASSED, [_PASSED.pack(message.run)]


def _draft(message: Draft) -> tuple[int, list[Data]]:
    guesses = message.guesses
    t, n = len(message.tail), len(guesses)
    body = struct.pack(
        f"<{t}I{n}I{n}i{n}d{n}H{n}H",
        *message.tail,
        *[g.token for g in guesses],
        *[g.parent for g in guesses],
        *[g.probability for g in guesses],
        *[g.rank for g in guesses],
        *[g.drafter for g in guesses],
    )
    return DRAFT, [_DRAFT.pack(message.seq, message.base, t, n, message.more), body]


def _committed(message: Committed) -> tuple[int, list[Data]]:
    n, sampling = len(message.tokens), message.sampling
    flags = message.over | (sampling is not None) << 1
    parts: list[Data] = [
        _COMMITTED.pack(message.seq, message.start, n, flags),
        struct.pack(f"<{n}I", *message.tokens),
    ]
    if sampling is not None:
        parts.append(_sampling(sampling))
    return COMMITTED, parts


_PACK: dict[type, Callable[[Any], tuple[int, list[Data]]]] = {
    RunMessage: _run,
    Cancel: _cancel,
    Result: _result,
    Passed: _passed,
    Draft: _draft,
    Committed: _committed,
}


# --- unpacking ------------------------------------------------------------------------------------------

ANY = Limits()


def unpack(data: Data, limits: Limits = ANY) -> Message:
    """The message in ``data``, which it may keep (activations are a view of it). BadMessage says what is wrong.

    What is made takes memory in proportion to ``data``, whatever its counts say.
    """
    kind, reader = open_message(data, PROTOCOL)
    read = _UNPACK.get(kind)
    if read is None:
        raise BadMessage(f"a message is of the unknown kind {kind}")
    message = read(reader, limits)
    reader.done()
    return message


def _read_run(reader: Reader, limits: Limits) -> RunMessage:
    epoch, run, flags, ops, n, total, listed, width = reader.take(_RUN)
    if flags > 7 or (listed and not flags & 2) or bool(width) != bool(flags & 4):
        raise BadMessage(f"run {run}: the flags {flags} contradict its counts")
    if ops > reader.end - reader.at:
        raise BadMessage(f"run {run}: {ops} cache operations can't be in {reader.end - reader.at} bytes")
    done = tuple(_read_op(reader, limits) for _ in range(ops))
    seqs, positions, tokens, slots, marks, counts, ancestors, live = reader.columns(
        (n, "Q"), (n, "I"), (n, "I"), (n, "I"), (n, "B"), (n, "H"), (total, "I"), (listed, "I")
    )
    below(seqs, 1 << 63, "sequence")
    below(positions, 1 << 31, "position")
    below(tokens, limits.vocab, "token")
    below(slots, limits.slots, "slot")
    below(ancestors, limits.slots, "slot")
    below(marks, 4, "row's flag byte")
    below(live, n, "live row")
    if sum(counts) != total:
        raise BadMessage(f"run {run}: its rows have {sum(counts)} ancestors, {total} are listed")
    if any(a >= b for a, b in pairwise(live)):
        raise BadMessage(f"run {run}: the live rows are not in order")
    rows = []
    at = 0
    for seq, position, token, slot, mark, count in zip(seqs, positions, tokens, slots, marks, counts, strict=True):
        if count and (not mark & 2 or count > position):
            raise BadMessage(f"run {run}: a row at position {position} has {count} ancestors and can't")
        above = ancestors[at : at + count] if count else ()
        rows.append(Row(seq, position, token, slot, bool(mark & 1), bool(mark & 2), above))
        at += count
    alive = listed if flags & 2 else n
    if limits.width is not None and width != (limits.width if alive else 0):
        raise BadMessage(f"run {run}: activations of width {width} for {alive} rows, {limits.width} was expected")
    x = None
    if width:
        if not alive:
            raise BadMessage(f"run {run}: activations of no rows")
        reader.skip_to(8)
        x = reader.floats(alive, width)
    return RunMessage(
        epoch, run, bool(flags & 1), done, tuple(rows), np.asarray(live, np.int32) if flags & 2 else None, x
    )


def _read_op(reader: Reader, limits: Limits) -> CacheOp:
    (kind,) = reader.take(_KIND)
    if kind == APPEND:
        seq, n = reader.take(_APPEND_BODY)
        slots, tokens = reader.columns((n, "I"), (n, "I"))
        below(slots, limits.slots, "slot")
        below(tokens, limits.vocab, "token")
        return Append(_seq(seq), slots, tokens)
    if kind == FORK:
        seq, source, length = reader.take(_FORK_BODY)
        return Fork(_seq(seq), _seq(source), length)
    if kind == FREE:
        return Free(_seq(reader.take(_SEQ_BODY)[0]))
    if kind == PARAMS:
        (seq,) = reader.take(_SEQ_BODY)
        return Params(_seq(seq), _read_sampling(reader, limits))
    raise BadMessage(f"a cache operation is of the unknown kind {kind}")


def _seq(value: int) -> int:
    below((value,), 1 << 63, "sequence")
    return value


def _read_sampling(reader: Reader, limits: Limits) -> Sampling:
    *values, n = reader.take(_SAMPLING)
    ids, amounts = reader.columns((n, "I"), (n, "d"))
    below(ids, limits.vocab, "token")
    temperature, top_k, top_p, min_p, penalty, last_n, frequency, presence, seed, choice, logprobs = values
    try:
        return Sampling(
            temperature, top_k, top_p, min_p, penalty, last_n, frequency, presence, seed, choice,
            tuple(zip(ids, amounts, strict=True)), logprobs,
        )  # fmt: skip
    except BadRequest as error:
        raise BadMessage(f"sampling parameters are wrong: {error}") from None


def _read_cancel(reader: Reader, limits: Limits) -> Cancel:
    epoch, run, n = reader.take(_CANCEL)
    (rows,) = reader.columns((n, "I"))
    if any(a >= b for a, b in pairwise(rows)):
        raise BadMessage(f"run {run}: the cancelled rows are not in order")
    return Cancel(epoch, run, frozenset(rows))


def _read_result(reader: Reader, limits: Limits) -> Result:
    epoch, run, n, total = reader.take(_RESULT)
    rows, tokens, logprobs, counts, ids, values = reader.columns(
        (n, "I"), (n, "i"), (n, "d"), (n, "B"), (total, "I"), (total, "d")
    )
    below(rows, 1 << 31, "row")
    below(tokens, limits.vocab, "token")
    below(ids, limits.vocab, "token")
    if tokens and min(tokens) < -1:
        raise BadMessage(f"run {run}: a token is {min(tokens)}")
    if sum(counts) != total:
        raise BadMessage(f"run {run}: {sum(counts)} alternatives announced, {total} listed")
    top = tuple(zip(ids, values, strict=True))
    choices = []
    at = 0
    for row, token, logprob, count in zip(rows, tokens, logprobs, counts, strict=True):
        choices.append(Choice(row, token, logprob, top[at : at + count]))
        at += count
    return Result(epoch, run, tuple(choices))


def _read_passed(reader: Reader, limits: Limits) -> Passed:
    return Passed(reader.take(_PASSED)[0])


def _read_draft(reader: Reader, limits: Limits) -> Draft:
    seq, base, t, n, more = reader.take(_DRAFT)
    below((more,), 2, "flag byte")
    tail, tokens, parents, chances, ranks, drafters = reader.columns(
        (t, "I"), (n, "I"), (n, "i"), (n, "d"), (n, "H"), (n, "H")
    )
    below(tail, limits.vocab, "token")
    below(tokens, limits.vocab, "token")
    below((base,), 1 << 31, "position")
    if any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise BadMessage(f"a draft of sequence {seq}: a guess comes before the one it stands on")
    if any(not 0.0 <= chance <= 1.0 for chance in chances):
        raise BadMessage(f"a draft of sequence {seq}: a probability is not from 0 to 1")
    return Draft(_seq(seq), base, tail, tuple(map(Guess, tokens, parents, chances, ranks, drafters)), bool(more))


def _read_committed(reader: Reader, limits: Limits) -> Committed:
    seq, start, n, flags = reader.take(_COMMITTED)
    below((flags,), 4, "flag byte")
    (tokens,) = reader.columns((n, "I"))
    below(tokens, limits.vocab, "token")
    below((start,), 1 << 31, "position")
    sampling = _read_sampling(reader, limits) if flags & 2 else None
    return Committed(_seq(seq), start, tokens, bool(flags & 1), sampling)


_UNPACK: dict[int, Callable[[Reader, Limits], Message]] = {
    RUN: _read_run,
    CANCEL: _read_cancel,
    RESULT: _read_result,
    PASSED: _read_passed,
    DRAFT: _read_draft,
    COMMITTED: _read_committed,
}
