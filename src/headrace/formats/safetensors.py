"""safetensors: the header of one file, and JSON read as hostile input.

Layout as in the format's README (huggingface/safetensors, "Format"): u64 length, JSON header, data; a tensor's
offsets count from the data's start, and the tensors cover the data without holes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from headrace.errors import BadFile
from headrace.formats.files import opened, read_exact, read_text
from headrace.formats.tensor import TensorInfo, check_extents, show

MAX_HEADER = 32 << 20
MARK_COST = 192
"""Bytes of our memory for each [, { or comma of a header, measured, rounded up."""
DTYPES = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
}  # fmt: skip
"""Bits a value; of these only F32, F16 and BF16 are computed with."""


def read_json(path: Path, most: int, what: str) -> object:
    """A small JSON file, read whole: at most ``most`` bytes, UTF-8, no key twice in an object."""
    return parse_json(path, read_text(path, what, most), what)


def parse_json(path: Path, raw: str | bytes, what: str) -> object:
    """JSON with one clear error for everything that can be wrong with it."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [k for k, _ in pairs]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise BadFile(f"{path}: the {what} has the key {show(twice)} twice; repair or download it again.")
        return found

    try:
        parsed: object = json.loads(raw if isinstance(raw, str) else raw.decode(), object_pairs_hook=unique)
        return parsed
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: the {what} isn't UTF-8 (byte {e.start}); download it again.") from None
    except RecursionError:
        raise BadFile(f"{path}: the {what} is nested too deep; download it again.") from None
    except ValueError as e:
        raise BadFile(f"{path}: the {what} isn't JSON ({str(e)[:120]}); download it again.") from None


def read_safetensors(path: Path) -> list[TensorInfo]:
    """The tensors of one file, in the header's order. BadFile names what is wrong."""
    with opened(path) as (fd, size):
        return _parse(fd, path, size)


def _parse(fd: int, path: Path, size: int) -> list[TensorInfo]:
    length = bytearray(min(8, size))
    read_exact(fd, memoryview(length), 0, path)
    n = int.from_bytes(length, "little")
    if size < 10:
        raise BadFile(f"{path}: has only {size} bytes, no safetensors header; download it again.")
    if n > size - 8 or n > MAX_HEADER:
        hint = "it is a web page or another kind of file" if length[:1] == b"<" else "it was cut short or is damaged"
        raise BadFile(f"{path}: claims a header of {n} bytes in a file of {size}; {hint}, download it again.")
    raw = bytearray(n)
    read_exact(fd, memoryview(raw), 8, path)
    # What the parsed header takes of our memory: at most the file's size and 1 MB (a tensor has some 9 marks).
    marks = raw.count(b"[") + raw.count(b"{") + raw.count(b",")
    if marks * MARK_COST > size + (1 << 20):
        raise BadFile(f"{path}: describes too many tensors for its {size} bytes; it is damaged, download it again.")
    header = parse_json(path, bytes(raw), "safetensors header")
    if not isinstance(header, dict):
        raise BadFile(f"{path}: its header isn't a JSON object; download it again.")
    header.pop("__metadata__", None)
    tensors = [_entry(path, name, entry, 8 + n, size) for name, entry in header.items()]
    check_extents(path, tensors)
    held, there = sum(t.nbytes for t in tensors), size - 8 - n
    if held != there:
        raise BadFile(f"{path}: its tensors take {held} bytes but it holds {there}: cut short; download it again.")
    return tensors


def _entry(path: Path, name: str, entry: object, start: int, size: int) -> TensorInfo:
    def bad(what: str) -> BadFile:
        return BadFile(f"{path}: tensor {show(name)} {what}; the file is damaged, download it again.")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad("isn't described by dtype, shape and data_offsets")
    dtype, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not name:
        raise bad("has no name or dtype")
    if not _counts(shape, 1 << 48) or len(shape) > 8:
        raise bad(f"has the impossible shape {show(str(shape)[:200])}")
    if not _counts(ends, 1 << 62) or len(ends) != 2 or not ends[0] <= ends[1] <= size - start:
        raise bad(f"lies at {show(str(ends)[:200])}, outside the data")
    nbytes = ends[1] - ends[0]
    bits = DTYPES.get(dtype, 0)
    if bits and math.prod(shape) * bits != nbytes * 8:
        raise bad(f"has {nbytes} bytes where {dtype} {shape} needs {math.prod(shape) * bits // 8}")
    fmt = dtype if bits else f"type {show(dtype)}"
    return TensorInfo(name, fmt, tuple(shape), path, start + ends[0], nbytes)


def _counts(value: object, most: int) -> bool:
    """A list of whole numbers from 0 to ``most`` (true and false are no numbers)."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= most for v in value)
