"""One index over a model's tensors, whatever files they lie in, and exact reads of their bytes."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, Unsupported
from headrace.formats.files import cannot_read, drop_cached, open_regular, read_exact
from headrace.formats.folder import listing, read_config, read_folder
from headrace.formats.gguf import GgufFile, read_gguf
from headrace.formats.tensor import KNOWN, TensorInfo, show

__all__ = ["ModelFile", "Rows", "TensorInfo", "named", "open_model", "require_known"]

Rows: TypeAlias = slice | NDArray[np.integer] | None
"""Which rows (of ``TensorInfo.n``) to read: all, a slice, or indices in the order wanted."""

SAMPLES = 64
"""Places in each file that ``digest`` looks at."""

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class ModelFile:
    """An open model: metadata and tensor index. Bytes are read on demand with pread, never mapped.

    metadata: for "gguf" the file's own keys (arrays as NumPy arrays or ``Strings``); for "hf" the objects "config",
    "generation_config", "tokenizer_config", ... and "files" (name -> path). types: GGUF value types, for rewriting.
    Threads may read at the same time. Closing is optional; a context manager.
    """

    kind: Literal["gguf", "hf"]
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]
    types: Mapping[str, str] = field(default_factory=dict)
    _open: dict[Path, int] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _stats: Mapping[Path, tuple[int, int]] = field(default_factory=dict, repr=False)
    _lean: threading.Event = field(default_factory=threading.Event, repr=False)

    def spare_cache(self) -> None:
        """From now on what is read doesn't stay in the page cache, which counts against a memory limit too."""
        self._lean.set()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def read(self, info: TensorInfo, rows: Rows = None) -> NDArray[np.uint8]:
        """The file's bytes of the chosen rows, one after the other: [rows * info.row_nbytes]."""
        out = np.empty(_count(info, rows) * info.row_nbytes, np.uint8)
        self.read_into(info, out, rows)
        return out

    def read_into(self, info: TensorInfo, out: NDArray[np.uint8], rows: Rows = None) -> None:
        """As ``read``, into ``out``: contiguous uint8 of exactly that many bytes."""
        if info.fmt.startswith("type "):
            require_known(self, [info.name])
        size = info.row_nbytes
        if out.dtype != np.uint8 or not out.flags.c_contiguous or out.nbytes != _count(info, rows) * size:
            raise ValueError(f"{info.name}: {out.nbytes} bytes given for {_count(info, rows)} rows of {size}")
        view = out.reshape(-1).data
        fd, done = self._descriptor(info.path), 0
        for first, count in _spans(info, rows):
            part = view[done : done + count * size]
            read_exact(fd, part, info.offset + first * size, info.path)
            if self._lean.is_set():
                drop_cached(fd, info.offset + first * size, count * size)
            done += count * size

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                fd, info = open_regular(path)
                self._open[path] = fd
                if self._stats.get(path) not in (None, (info.st_size, info.st_mtime_ns)):
                    raise BadFile(f"{path}: was changed since it was opened; start again with the new file.")
            return self._open[path]

    def digest(self) -> str:
        """A name for the content, the same on every machine: metadata's bytes, index, and 64 places in each file.

        Not every byte is read (a model may have a terabyte); see ``identity`` for what also notices an edit in place.
        """
        h = hashlib.sha256()
        for t in sorted(self.tensors.values(), key=lambda t: t.name):
            h.update(repr((t.name, t.fmt, t.shape, t.offset, t.nbytes)).encode())
        for path in self.paths:
            fd, size = self._descriptor(path), path.stat().st_size
            h.update(size.to_bytes(8, "little"))
            for at, length in samples(size):
                piece = bytearray(length)
                read_exact(fd, memoryview(piece), at, path)
                h.update(piece)
        return h.hexdigest()

    def identity(self) -> str:
        """``digest`` and the files' times of change: names this copy, for files derived from it on this machine."""
        times = repr([path.stat().st_mtime_ns for path in self.paths])
        return hashlib.sha256((self.digest() + times).encode()).hexdigest()

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class Derived(ModelFile):
    """``source`` read in another way, that ``how`` tells: a model of its own. Closing it closes the source."""

    source: ModelFile = field(kw_only=True)
    how: str = field(kw_only=True)

    def read_into(self, info: TensorInfo, out: NDArray[np.uint8], rows: Rows = None) -> None:
        self.source.read_into(info, out, rows)

    def spare_cache(self) -> None:
        self.source.spare_cache()

    def digest(self) -> str:
        return hashlib.sha256(f"{self.source.digest()} {self.how}".encode()).hexdigest()

    def close(self) -> None:
        self.source.close()


def samples(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the places that a digest looks at in a file of ``size`` bytes."""
    places = [0, *(size * i // SAMPLES for i in range(1, SAMPLES)), max(0, size - 4096)]
    return [(at, min(4096, size - at)) for at in places]


def open_model(path: str | Path) -> ModelFile:
    """Open a .gguf file (any shard of a split one), a Hugging Face folder, or a bare config.json (no tensors).

    BadFile or Unsupported says in a sentence what is wrong. Tensors of types we can't compute with are listed all
    the same; ``require_known`` refuses them when they are needed.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as e:
        raise BadFile(f"{str(path)!r}: can't be a path ({e}); check it.") from None
    if is_folder:
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        raise BadFile(f"{path}: lists the shards of a model; give the folder it lies in.")
    if path.name.endswith(".json"):
        return ModelFile("hf", read_config(path), {}, ())
    if path.name.endswith(".safetensors") and path.exists():
        raise BadFile(f"{path}: holds weights without their configuration; give the folder it lies in.")
    return _open_gguf(path)


def require_known(model: ModelFile, names: Iterable[str] | None = None) -> None:
    """Unsupported, naming tensor and type, when one of ``names`` (None: all) has a type we can't compute with."""
    for name in model.tensors if names is None else names:
        t = model.tensors[name]
        if t.fmt not in KNOWN:
            alike = sum(o.fmt == t.fmt for o in model.tensors.values()) - 1
            others = f" and {alike} more" if alike else ""
            raise Unsupported(
                f"{t.path}: tensor {show(name)}{others} has the type {t.fmt}, which Headrace can't "
                f"compute with; use a file of the types {', '.join(KNOWN)}."
            )


def _open_folder(folder: Path) -> ModelFile:
    if not (folder / "config.json").exists():
        ggufs = [n for n in listing(folder) if n.endswith(".gguf")]
        first = [n for n in ggufs if not (m := SPLIT.fullmatch(n)) or m[2] == "00001"]
        if len(first) == 1:
            return _open_gguf(folder / first[0])
        if ggufs:
            raise BadFile(f"{folder}: holds several models ({', '.join((first or ggufs)[:8])}); give the path of one.")
        raise BadFile(f"{folder}: holds no model (neither config.json nor a .gguf file); check the path.")
    metadata, tensors, paths = read_folder(folder)
    return ModelFile("hf", metadata, {t.name: t for t in tensors}, tuple(paths), _stats=_stat(paths))


def _open_gguf(path: Path) -> ModelFile:
    given = read_gguf(path)
    count = given.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 0:
        raise BadFile(f"{path}: split.count is no count; download it again.")
    parts = _parts(given, count) if count > 1 else [given]
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for t in part.tensors:
            if t.name in tensors:
                other = tensors[t.name].path.name
                raise BadFile(f"{part.path}: tensor {show(t.name)} is also in {other}; download the parts again.")
            tensors[t.name] = t
    total = first.metadata.get("split.tensors.count", len(tensors))
    if count > 1 and total != len(tensors):
        what = f"{len(tensors)} tensors where split.tensors.count says {total}"
        raise BadFile(f"{path}: its parts hold {what}; download the parts again.")
    paths = tuple(part.path for part in parts)
    return ModelFile("gguf", first.metadata, tensors, paths, first.types, _stats=_stat(paths))


def _parts(given: GgufFile, count: int) -> list[GgufFile]:
    """All parts of a split model, in order, found by the name of one: stem-00001-of-00003.gguf."""
    name = SPLIT.fullmatch(given.path.name)
    if name is None or int(name[3]) != count:
        like = f"NAME-00001-of-{count:05d}.gguf"
        raise BadFile(f"{given.path}: is one of {count} parts but isn't named like one ({like}); rename the parts.")
    parts = []
    for i in range(count):
        path = given.path.with_name(f"{name[1]}-{i + 1:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise BadFile(f"{given.path}: is one of {count} parts, and {path.name} is missing beside it; download it.")
        part = given if path == given.path else read_gguf(path)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (i, count):
            raise BadFile(f"{path}: split.no and split.count inside don't agree with its name; download it again.")
        parts.append(part)
    return parts


def _stat(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    try:
        return {p: ((s := p.stat()).st_size, s.st_mtime_ns) for p in paths}
    except OSError as e:
        raise cannot_read(next(iter(paths)), "model file", e) from None


def _count(info: TensorInfo, rows: Rows) -> int:
    return len(rows) if isinstance(rows, np.ndarray) else len(range(info.n)[rows or slice(None)])


def _spans(info: TensorInfo, rows: Rows) -> list[tuple[int, int]]:
    """Rows as (first, count) stretches that lie together in the file. IndexError for a row that isn't there."""
    if not isinstance(rows, np.ndarray):
        there = range(info.n)[rows or slice(None)]
        if there.step == 1:
            return [(there.start, len(there))]
        rows = np.array(there, np.int64)
    if not len(rows):
        return []
    if rows.min() < 0 or rows.max() >= info.n:
        raise IndexError(f"{info.name}: rows {rows.min()}..{rows.max()} asked of {info.n}")
    breaks = np.flatnonzero(np.diff(rows.astype(np.int64)) != 1) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(rows)])))
    return list(zip(rows[starts].tolist(), counts.tolist(), strict=True))


def named(file: ModelFile) -> str:
    """What the model is called: its own name, else its file's."""
    given = file.metadata.get("general.name")
    return given if isinstance(given, str) and given else file.paths[0].stem if file.paths else "model"
