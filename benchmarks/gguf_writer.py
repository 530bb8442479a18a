"""Writing GGUF version 3, streaming: for inflated and requantised models and for tests."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.formats.cursor import Strings
from headrace.formats.files import atomic
from headrace.formats.gguf import ARRAY, BOOL, SCALARS, STRING
from headrace.formats.tensor import GGML_TYPES, tensor_nbytes

Chunks: TypeAlias = Iterable[bytes | NDArray[np.uint8]]
TensorSource: TypeAlias = tuple[str, tuple[int, ...], Chunks]
"""(format, shape outermost first, the file bytes in pieces)"""

_NUMBERS = {name: (kind, dtype) for kind, (name, dtype) in SCALARS.items()}
_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_BY_DTYPE = {np.dtype(dtype): kind for kind, (name, dtype) in SCALARS.items() if kind != BOOL} | {
    np.dtype(np.bool_): BOOL
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, TensorSource],
    types: Mapping[str, str] | None = None,
    alignment: int = 32,
) -> None:
    """Write ``path`` whole or not at all; a tensor's pieces are taken one by one, in order, and may be generated.

    metadata: as ``ModelFile.metadata`` of a GGUF file. A number's type is the one in ``types`` ("u32", "f32", ...);
    without one bool -> bool, int -> u32, i32, u64 or i64, the first that fits, float -> f32. ValueError when pieces
    don't add up to the tensor's size or a value has no GGUF type.
    """
    pairs = {k: v for k, v in metadata.items() if k != "general.alignment"}
    if alignment != 32:
        pairs["general.alignment"] = alignment
    with atomic(path) as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
        for key, value in pairs.items():
            kind, raw = _value(value, (types or {}).get(key))
            f.write(_text(key) + struct.pack("<I", kind) + raw)
        offset = 0
        for name, (fmt, shape, _) in tensors.items():
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            f.write(_text(name) + dims + struct.pack("<IQ", _IDS[fmt], offset))
            offset += _padded(tensor_nbytes(fmt, shape), alignment)
        _pad(f, alignment)
        for name, (fmt, shape, chunks) in tensors.items():
            _write_tensor(f, name, tensor_nbytes(fmt, shape), chunks)
            _pad(f, alignment)


def _write_tensor(f: BinaryIO, name: str, size: int, chunks: Chunks) -> None:
    left = size
    for chunk in chunks:
        raw = chunk if isinstance(chunk, bytes) else np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
        left -= len(raw)
        if left < 0:
            break
        f.write(raw)
    if left:
        raise ValueError(f"tensor {name} needs {size} bytes, its pieces have {'more' if left < 0 else size - left}")


def _padded(size: int, alignment: int) -> int:
    return math.ceil(size / alignment) * alignment


def _pad(f: BinaryIO, alignment: int) -> None:
    f.write(bytes(-f.tell() % alignment))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object, kind: str | None) -> tuple[int, bytes]:
    """(value type, its bytes)"""
    if isinstance(value, str):
        return STRING, _text(value)
    if isinstance(value, np.ndarray):
        number = _BY_DTYPE[value.dtype]
        return ARRAY, struct.pack("<IQ", number, value.size) + value.tobytes()
    if isinstance(value, Sequence):
        return ARRAY, _sequence(value)
    if isinstance(value, np.generic):
        return _BY_DTYPE[value.dtype], value.tobytes()
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{type(value).__name__} has no GGUF type")
    number, dtype = _NUMBERS[kind or _smallest(value)]
    return number, np.array(value, dtype).tobytes()


def _sequence(values: Sequence[object]) -> bytes:
    if isinstance(values, Strings):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(map(_text, values))
    items = [_value(v, None) for v in values]
    if any(isinstance(v, bool | int | float) for v in values):
        # One type for all of them: the widest.
        common = np.array(values)
        common = common.astype({"b": np.bool_, "i": np.int32, "f": np.float32}[common.dtype.kind])
        if common.tolist() != list(values) and common.dtype != np.float32:
            raise ValueError("whole numbers over 31 bits in a list; give a NumPy array")
        return _value(common, None)[1]
    kinds = {kind for kind, _ in items} or {STRING}
    if len(kinds) > 1:
        raise ValueError("an array holds one type")
    return struct.pack("<IQ", kinds.pop(), len(items)) + b"".join(raw for _, raw in items)


def _smallest(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "f32"
    bounds = {"u32": (0, 2**32), "i32": (-(2**31), 2**31), "u64": (0, 2**64), "i64": (-(2**63), 2**63)}
    for name, (low, high) in bounds.items():
        if low <= value < high:
            return name
    raise ValueError(f"{value} is too big for GGUF")
