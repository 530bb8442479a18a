"""Layers for ranks without the model file: from the head, or a nearer rank that has it, over the link (``--ship``).

The receiver makes files of the model's names and sizes in its cache folder and fills in what it needs; the rest stays
holes. First each file's head and the places that its digest looks at, so that the model is opened and compared like any
other; then the tensors of its layers. It asks for some parts at a time, each comes with a hash of its bytes, and a
journal names those that are safely on the disk, so that the next job goes on where this one was.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from headrace.cluster.handshake import PART, Control, Manifest, Part, Want
from headrace.cluster.members import CONTROL
from headrace.errors import BadFile, BadMessage, HeadraceError
from headrace.formats.files import open_shared, opened, read_exact, sync_folder, try_lock, write_exact
from headrace.formats.folder import FILES, INDEX, OBJECTS
from headrace.formats.index import Derived, ModelFile, samples
from headrace.model.layers import EARLY, Model
from headrace.store.cache import LOCK, require_room, writing

WINDOW = 16 << 20
"""Bytes asked for that haven't come: what the giver and MPI hold for one receiver."""
BATCH = 64 << 20
"""Bytes after which what came is made safe on the disk; an interruption loses at most those."""
SPARE = 16 << 20
STAMP = 1_000_000_000 * 10**9
"""The files' time of change, always this: files made from them (packs) are named by it."""
SEALED = "sealed"

Place: TypeAlias = tuple[int, int, int]
"""File by number, offset, bytes."""
Hear: TypeAlias = Callable[[type[Any], int], Any]
"""(kind, rank) -> the next message of that kind from that rank."""


class Sends(Protocol):
    """What is needed of a ``members.Link``."""

    asked: Callable[[int, Want], None] | None

    @property
    def rank(self) -> int: ...
    def send(self, rank: int, to: int, message: Control) -> None: ...
    def fail(self, error: HeadraceError) -> None: ...


def source_of(file: ModelFile) -> ModelFile:
    """The files themselves, under whatever is derived from them as they are read."""
    while isinstance(file, Derived):
        file = file.source
    return file


def files_of(file: ModelFile) -> list[Path]:
    """All that opening and computing the model reads; weights last."""
    if file.kind == "gguf":
        return list(file.paths)
    folder = file.paths[0].parent
    small = ("config.json", *(f"{key}.json" for key in OBJECTS), *FILES, INDEX)
    return [*(folder / name for name in small if (folder / name).is_file()), *file.paths]


def places_of(model: Model, layers: Iterable[int]) -> list[Place]:
    """Where the tensors of these layers lie, each once, in file order."""
    file = source_of(model.file)
    number = {path: i for i, path in enumerate(files_of(file))}
    infos = {p.source.tensor: file.tensors[p.source.tensor] for i in layers for p in model.layers[i].tensors.values()}
    return sorted((number[t.path], t.offset, t.nbytes) for t in infos.values())


def manifest(file: ModelFile) -> Manifest:
    """What a receiver must know first."""
    file = source_of(file)
    paths = files_of(file)
    sizes = tuple(path.stat().st_size for path in paths)
    first = {path: min(t.offset for t in file.tensors.values() if t.path == path) for path in file.paths}
    heads = tuple(first.get(path, size) for path, size in zip(paths, sizes, strict=True))
    early = [file.tensors[name] for name in EARLY if name in file.tensors]
    places = tuple(n for t in early for n in (paths.index(t.path), t.offset, t.nbytes))
    return Manifest(file.kind, "/".join(p.name for p in paths), sizes, heads, places, file.digest())


def nearest(rank: int, hosts: Sequence[str], whole: Sequence[int]) -> int:
    """Which of the ``whole`` ranks one that lacks the file asks: one of its host, else they take turns."""
    return next((i for i in whole if hosts[i] == hosts[rank]), whole[rank % len(whole)])


class Giver:
    """Gives parts of the files of this rank's models to ranks that ask, from a thread of its own."""

    def __init__(self, link: Sends, files: Sequence[ModelFile]) -> None:
        self.link, self.files = link, files
        self._paths = [files_of(source_of(file)) for file in files]
        self._wants: queue.SimpleQueue[tuple[int, Want] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="giver", daemon=True)
        self._thread.start()
        link.asked = lambda rank, want: self._wants.put((rank, want))

    def close(self) -> None:
        self.link.asked = None
        self._wants.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (asked := self._wants.get()) is not None:
            rank, want = asked
            try:
                for message in self.answers(want):
                    self.link.send(rank, CONTROL, message)
            except HeadraceError as error:
                self.link.fail(error)
            except OSError as error:  # a file that is gone meanwhile
                self.link.fail(BadFile(f"{error.filename}: can't be given to rank {rank} ({error.strerror})."))

    def answers(self, want: Want) -> Iterator[Manifest | Part]:
        """BadMessage for what isn't in the files."""
        if want.which >= len(self.files):
            raise BadMessage(f"There is no model {want.which} to be shipped; give every rank the same command line.")
        if not want.parts:
            yield manifest(self.files[want.which])
        for number, offset, nbytes in _triples(want.parts):
            if number >= len(self._paths[want.which]) or nbytes > PART:
                raise BadMessage(f"A part of {nbytes} bytes of file {number} was asked for, and there is none.")
            path = self._paths[want.which][number]
            data = memoryview(bytearray(nbytes))
            with opened(path) as (fd, _):
                read_exact(fd, data, offset, path)
            yield Part(want.which, number, offset, _sum(data), data)


class Parcel:
    """The files of a model that is shipped to this rank. ``path``: what to open, once ``begin`` is over.

    folder: under which the files get a folder, named by the digest and the first number that no other process has.
    """

    def __init__(self, link: Sends, which: int, folder: Path, hear: Hear, tell: Callable[[str], None]) -> None:
        self.link, self.which, self.hear, self.tell = link, which, hear, tell
        link.send(0, CONTROL, Want(which, ()))
        self.manifest: Manifest = hear(Manifest, 0)
        self.names = _checked(self.manifest)
        self._fds: list[int] = []
        self._done: dict[Place, str] = {}
        self._fresh: dict[Place, str] = {}
        """Came, but not yet safe."""
        self.received = 0
        self._lock, self.folder = _own_folder(folder, self.manifest.digest[:32])
        self.path = self.folder / self.names[0] if self.manifest.kind == "gguf" else self.folder
        try:
            with writing(self.folder):
                self._open()
            self._begin()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for fd in (*self._fds, self._lock):
            os.close(fd)
        self._fds = []

    def fetch(self, places: Iterable[Place], giver: int, what: str) -> None:
        """Have these bytes; what isn't here comes from the rank ``giver``. Unavailable when the disk is too full."""
        todo = [piece for piece in dict.fromkeys(_pieces(places)) if piece not in self._done]
        need = sum(nbytes for _, _, nbytes in todo)
        if todo:
            require_room(self.folder, need + SPARE)
            self.tell(f"Receiving {need / 1e6:,.1f} MB of {what} from rank {giver} into {self.folder}")
            start = time.monotonic()
            with writing(self.folder):
                try:
                    self._receive(todo, giver)
                finally:
                    self._keep()
            took = time.monotonic() - start
            self.tell(f"Received {need / 1e6:,.1f} MB of {what} in {took:.2f} s, {need / 1e6 / took:,.1f} MB/s")
        with writing(self.folder):
            self._write_journal([SEALED])
            for name in self.names:
                os.utime(self.folder / name, ns=(STAMP, STAMP))

    def _receive(self, todo: list[Place], giver: int) -> None:
        """Keep ``WINDOW`` bytes asked for; write what comes."""
        waiting: set[Place] = set()
        asked = under_way = fresh = 0
        while asked < len(todo) or waiting:
            while asked < len(todo) and under_way < WINDOW:
                waiting.add(piece := todo[asked])
                self.link.send(giver, CONTROL, Want(self.which, piece))
                asked, under_way = asked + 1, under_way + piece[2]
            part: Part = self.hear(Part, giver)
            place = part.file, part.offset, len(part.data)
            if place not in waiting or part.which != self.which:
                continue  # asked for before a rank was lost
            if _sum(part.data) != part.sum:
                raise BadMessage(f"Rank {giver} sent a part of the model that isn't what its hash says; start again.")
            waiting.remove(place)
            under_way, fresh = under_way - place[2], fresh + place[2]
            self.received += place[2]
            write_exact(self._fds[part.file], memoryview(part.data), part.offset)
            self._fresh[place] = part.sum.hex()
            if fresh >= BATCH:
                self._keep()
                fresh = 0

    # --- what is here -----------------------------------------------------------------------------------

    def _open(self) -> None:
        """The files, full of holes, and which parts are in them. Those not sealed are looked at again."""
        self.journal = self.folder / ".journal"
        for name in self.names:
            self._fds.append(open_shared(self.folder / name))
        if any(os.fstat(fd).st_size != size for fd, size in zip(self._fds, self.manifest.sizes, strict=True)):
            self.journal.unlink(missing_ok=True)  # before the files look whole
            sync_folder(self.folder)
            for fd, size in zip(self._fds, self.manifest.sizes, strict=True):
                os.ftruncate(fd, size)
        sync_folder(self.folder)
        lines = self.journal.read_text(errors="replace").split("\n")[:-1] if self.journal.exists() else []
        sealed = max((i for i, line in enumerate(lines) if line == SEALED), default=-1)
        for i, line in enumerate(lines):
            with suppress(ValueError):
                *numbers, said = line.split()
                number, offset, nbytes = map(int, numbers)
                if i < sealed or self._sum_here((number, offset, nbytes)) == said:
                    self._done[number, offset, nbytes] = said
        self._write_journal([""])  # behind a line that was cut short

    def _sum_here(self, place: Place) -> str | None:
        number, offset, nbytes = place
        if not (0 <= number < len(self._fds) and 0 < nbytes <= PART):
            return None
        data = memoryview(bytearray(nbytes))
        try:
            read_exact(self._fds[number], data, offset, self.folder / self.names[number])
        except BadFile:
            return None
        return _sum(data).hex()

    def _begin(self) -> None:
        """All that opening the model reads."""
        places: list[Place] = []
        for i, (size, head) in enumerate(zip(self.manifest.sizes, self.manifest.heads, strict=True)):
            places += [(i, 0, head), *((i, at, nbytes) for at, nbytes in samples(size) if at + nbytes > head)]
        self.fetch([*places, *_triples(self.manifest.early)], 0, "the model's description")

    def _keep(self) -> None:
        """Make what came safe: the bytes before the journal's word for them."""
        for number in {place[0] for place in self._fresh}:
            os.fsync(self._fds[number])
        self._write_journal([f"{n} {offset} {nbytes} {said}" for (n, offset, nbytes), said in self._fresh.items()])
        self._done |= self._fresh
        self._fresh = {}

    def _write_journal(self, lines: Sequence[str]) -> None:
        with self.journal.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())


def _own_folder(folder: Path, name: str) -> tuple[int, Path]:
    """(lock, folder): NAME-0, or the next that no other process has; the lock goes with the process."""
    number = 0
    while True:
        own = folder / f"{name}-{number}"
        with writing(own):
            own.mkdir(parents=True, exist_ok=True)
            fd = open_shared(own / LOCK)
            try:
                if try_lock(fd):
                    return fd, own
            except BaseException:
                os.close(fd)
                raise
        os.close(fd)
        number += 1


def _checked(m: Manifest) -> list[str]:
    """The names, when they are of files in one folder and the numbers make sense; else BadMessage."""
    names = m.names.split("/")
    plain = all(name and not name.startswith(".") and not any(c in name for c in "\\:\0") for name in names)
    hexed = m.digest.isalnum() and m.digest.isascii()
    sized = len(names) == len(set(names)) == len(m.sizes) == len(m.heads) and all(map(int.__ge__, m.sizes, m.heads))
    if not (plain and hexed and sized and m.kind in ("gguf", "hf")) or len(m.early) % 3:
        raise BadMessage("The head's list of the model's files makes no sense; install the same Headrace everywhere.")
    return names


def _pieces(places: Iterable[Place]) -> Iterator[Place]:
    """As parts of at most ``PART`` bytes."""
    for number, offset, nbytes in places:
        for at in range(0, nbytes, PART):
            yield number, offset + at, min(PART, nbytes - at)


def _triples(flat: Sequence[int]) -> Iterator[Place]:
    if len(flat) % 3:
        raise BadMessage(f"Places in files are told in {len(flat)} numbers, which isn't three each.")
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def _sum(data: memoryview | bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
