"""A vocabulary from the metadata of a GGUF file (keys ``tokenizer.ggml.*``, GGUF specification, "Tokenizer")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, Unsupported
from headrace.text import kinds
from headrace.text.vocab import Vocab, end_ids, looks_control

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""``tokenizer.ggml.token_type`` values."""


class _Tokens(NamedTuple):
    names: list[str]
    types: NDArray[Any]
    ids: dict[str, int]
    control: dict[str, int]
    user: dict[str, int]

    @property
    def literal(self) -> set[int]:
        return {*self.control.values(), *self.user.values()}


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary of a GGUF file. Raises BadFile (missing, of the wrong type, inconsistent) or Unsupported."""
    model = _get(metadata, "model", str)
    reader = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if reader is None:
        raise Unsupported(f"tokenizer.ggml.model is {model!r}; Headrace reads 'gpt2' and 'llama': use another file.")
    names = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(names), NORMAL)
    ids = dict(zip(names, range(len(names)), strict=True))
    if len(ids) != len(names):
        raise BadFile("tokenizer.ggml.tokens holds the same token twice; get the file again or convert it again.")
    odd = [(i, types[i]) for i in np.flatnonzero(types != NORMAL).tolist() if names[i]]
    control = {
        names[i]: i for i, t in odd if t in (CONTROL, UNKNOWN) or (t == USER_DEFINED and looks_control(names[i]))
    }
    user = {names[i]: i for i, t in odd if t == USER_DEFINED and names[i] not in control}
    return reader(metadata, _Tokens(names, types, ids, control, user))


def _byte_level(metadata: Mapping[str, Any], tokens: _Tokens) -> Vocab:
    name = _get(metadata, "pre", str, "default")
    kind = kinds.PRE_KINDS.get(name)
    if kind is None:
        known = ", ".join(sorted(kinds.PRE_KINDS))
        raise Unsupported(f"tokenizer.ggml.pre is {name!r}, which Headrace doesn't know; it knows {known}.")
    for key in ("add_space_prefix", "escape_whitespaces"):
        if _get(metadata, key, bool, False):
            raise Unsupported(f"tokenizer.ggml.{key} is set on a byte-level vocabulary, which Headrace doesn't know.")
    for special in tokens.control:
        del tokens.ids[special]
    encode, missing = kinds.byte_level_encoder(tokens.ids, _strings(metadata, "merges"), kind)
    piece = kinds.byte_level_piece(tokens.names.__getitem__, tokens.literal)
    vocab = Vocab(len(tokens.names), encode, piece, tokens.control, tokens.user, missing=missing)
    return _finish(metadata, vocab, kind.add_bos, {})


def _sentencepiece(metadata: Mapping[str, Any], tokens: _Tokens) -> Vocab:
    size = len(tokens.names)
    scores = _numbers(metadata, "scores", size).astype(np.float64)
    ranks: dict[str, float] = dict(zip(tokens.names, (-scores).tolist(), strict=True))
    byte_ids = {tokens.names[i]: i for i in np.flatnonzero(tokens.types == BYTE).tolist()}
    try:
        byte_of = {i: bytes.fromhex(t.removeprefix("<0x").removesuffix(">"))[0] for t, i in byte_ids.items()}
    except (ValueError, IndexError):
        raise BadFile("tokenizer.ggml.tokens has a byte token not written <0xHH>; get the file again.") from None
    # Neither control nor byte tokens are made by merging: text that reads "<s>" or "<0x41>" is just text.
    for special in (*tokens.control, *byte_ids):
        del tokens.ids[special], ranks[special]
    unk = _token(metadata, "unknown", size, 0)
    back = {b: i for i, b in byte_of.items()}
    prefix = _get(metadata, "add_space_prefix", bool, True)
    encode = kinds.sentencepiece_encoder(tokens.ids, ranks, [back.get(b, unk) for b in range(256)], prefix)
    piece = kinds.sentencepiece_piece(tokens.names.__getitem__, tokens.literal, byte_of)
    vocab = Vocab(size, encode, piece, tokens.control, tokens.user, space_prefix=prefix)
    return _finish(metadata, vocab, True, {"bos": 1, "eos": 2, "unknown": 0})


def _finish(metadata: Mapping[str, Any], vocab: Vocab, add_bos: bool, defaults: Mapping[str, int]) -> Vocab:
    """With what metadata says of special tokens."""
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    special = {k: _token(metadata, k, vocab.size, defaults.get(k)) for k in names}
    add_bos = _get(metadata, "add_bos_token", bool, add_bos)
    if add_bos and special["bos"] is None:
        raise BadFile("tokenizer.ggml.add_bos_token is set but bos_token_id isn't; get the file again.")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadFile(f"tokenizer.chat_template is a {type(template).__name__}, not a string; get the file again.")
    given = {i for k in ("eos", "eot", "eom") if (i := special[k]) is not None}
    return replace(
        vocab, bos=special["bos"], eos=special["eos"], unk=special["unknown"], pad=special["padding"],
        ends=end_ids(vocab.control, given), add_bos=add_bos, template=template,
    )  # fmt: skip


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is None:
        raise BadFile(f"The file has no {key}: it holds no vocabulary; use a complete model file.")
    if not isinstance(value, kind):
        raise BadFile(f"{key} is a {type(value).__name__}, not a {kind.__name__}; get the file again.")
    return value


def _token(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < size else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise BadFile(f"{key} is {value!r}, outside the vocabulary of {size:,}; get the file again.")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else []
    if set(map(type, listed)) != {str}:
        raise BadFile(f"tokenizer.ggml.{name} is no list of strings: the vocabulary is incomplete; get the file again.")
    return listed


def _numbers(metadata: Mapping[str, Any], name: str, count: int, default: float | None = None) -> NDArray[Any]:
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    array = np.full(count, default) if values is None and default is not None else np.asarray(values)
    if array.shape != (count,):
        raise BadFile(f"{key} is missing or not as long as tokenizer.ggml.tokens ({count:,}); get the file again.")
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise BadFile(f"{key} holds something that is no number; get the file again.")
    return array
