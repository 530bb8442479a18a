"""Layers sent to ranks without the model file: only theirs, checked by hash, resumed; the text is the same."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helpers_mpi
from headrace.cluster import handshake, ship
from headrace.cluster.handshake import Manifest, Part, Want
from headrace.cluster.ship import Giver, Parcel, files_of, manifest, nearest, places_of
from headrace.cluster.split import over_ranks
from headrace.engine import Options, load
from headrace.errors import BadMessage, Unavailable
from headrace.formats.index import open_model
from headrace.model.layers import load_model
from headrace.store import cache
from helpers_mpi import command, environment, needs_mpi, tokens_of
from helpers_text import smollm2
from helpers_tiny import tiny_model

PIECE = 8 << 10


class Wire:
    """A link of two ranks without MPI: what rank 1 wants is answered when it listens. most: parts until it breaks."""

    def __init__(self, path: Path, most: int = 1 << 30) -> None:
        self.rank, self.most = 1, most
        self.asked: Callable[[int, Want], None] | None = None
        self.model = load_model(open_model(path))
        self.giver = Giver.__new__(Giver)
        self.giver.files, self.giver._paths = [self.model.file], [files_of(self.model.file)]
        self.waiting: deque[Any] = deque()
        self.spoil: Callable[[Part], Part] = lambda part: part
        self.asked_for: list[Want] = []

    def send(self, rank: int, to: int, message: Any) -> None:
        assert rank == 0 and to == -3 and isinstance(message, Want)
        self.asked_for.append(message)
        self.waiting.extend(self.giver.answers(message))

    def fail(self, error: Exception) -> None:
        raise error

    def hear(self, kind: type[Any], rank: int) -> Any:
        said = self.waiting.popleft()
        assert isinstance(said, kind)
        if isinstance(said, Part):
            self.most -= 1
            if self.most < 0:
                raise RuntimeError
            said = self.spoil(said)
        return handshake.unpack(handshake.pack(said))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "PART", PIECE)
    monkeypatch.setattr(ship, "WINDOW", 4 * PIECE)
    monkeypatch.setattr(ship, "BATCH", 8 * PIECE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("ship") / "tiny.gguf", blocks=7, text=True, ffn=1024)


def receive(wire: Wire, folder: Path, layers: Sequence[int]) -> Parcel:
    """What a rank does, up to its weights."""
    parcel = Parcel(wire, 0, folder, wire.hear, lambda line: None)
    try:
        with open_model(parcel.path) as file:
            assert file.digest() == wire.model.file.digest()
            parcel.fetch(places_of(load_model(file), layers), 0, "layers")
    finally:
        parcel.close()
    return parcel


def test_only_what_is_needed_is_sent(tiny: Path, tmp_path: Path) -> None:
    wire = Wire(tiny)
    parcel = receive(wire, tmp_path, [3, 4])
    model = wire.model
    own = sum(nbytes for _, _, nbytes in places_of(model, [3, 4]))
    head = manifest(model.file).heads[0]
    assert own <= parcel.received <= own + head + 66 * 4096
    with open_model(parcel.path) as file:
        here = load_model(file)
        for i, layer in enumerate(model.layers):
            for plan in layer.tensors.values():
                name = plan.source.tensor
                theirs, ours = model.file.read(model.file.tensors[name]), file.read(here.file.tensors[name])
                if i in (3, 4):
                    assert np.array_equal(theirs, ours)
                elif theirs.nbytes > 16384:
                    assert not np.array_equal(theirs, ours), "nobody asked for it"
        assert file.identity() == open_model(parcel.path).identity()
    again = receive(wire, tmp_path, [3, 4])
    assert again.received == 0 and again.path == parcel.path
    more = receive(wire, tmp_path, [3, 4, 5])
    assert more.received == sum(nbytes for _, _, nbytes in places_of(model, [5]))
    assert [entry.name for entry in cache.entries(tmp_path.parent)] == []
    assert len(wire.asked_for) > 10


def test_an_interrupted_transfer_goes_on_and_looks_at_what_it_has(tiny: Path, tmp_path: Path) -> None:
    whole = receive(Wire(tiny), tmp_path / "whole", range(9)).received
    wire = Wire(tiny, most=60)
    with pytest.raises(RuntimeError):
        receive(wire, tmp_path, range(9))
    half = receive(Wire(tiny), tmp_path, range(9))
    assert 0 < half.received <= whole - 40 * 4096
    # What came after the last sealed state is looked at again: a damaged part comes anew, the others don't.
    journal = half.folder / ".journal"
    lines = [line for line in journal.read_text().split("\n") if line != ship.SEALED]
    journal.write_text("\n".join(lines) + "\n12 torn")
    _, offset, nbytes, _ = max((line.split() for line in lines if line.strip()), key=lambda line: int(line[2]))
    with half.path.open("r+b") as file:
        file.seek(int(offset) + int(nbytes) // 2)
        file.write(b"damaged")
    with open_model(tiny) as model:
        if half.path.read_bytes() == tiny.read_bytes():
            pytest.fail("nothing was damaged")
        assert model.nbytes > int(nbytes)
    last = receive(Wire(tiny), tmp_path, range(9))
    assert last.received == int(nbytes)
    assert last.path.read_bytes()[int(offset) :][: int(nbytes)] == tiny.read_bytes()[int(offset) :][: int(nbytes)]


def test_a_part_that_is_not_its_hash_is_refused(tiny: Path, tmp_path: Path) -> None:
    wire = Wire(tiny)

    def spoil(part: Part) -> Part:
        return Part(part.which, part.file, part.offset, part.sum, bytes([part.data[0] ^ 1]) + bytes(part.data[1:]))

    wire.spoil = spoil
    with pytest.raises(BadMessage, match="isn't what its hash says"):
        receive(wire, tmp_path, [1])


def test_room_is_looked_for_first(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 20 << 20)
    receive(Wire(tiny), tmp_path, [1])
    monkeypatch.setattr(cache, "free_bytes", lambda folder: (16 << 20) + 4096)
    with pytest.raises(Unavailable, match="are needed and the disk has"):
        receive(Wire(tiny), tmp_path, [1, 2, 3])


def test_two_processes_have_folders_of_their_own(tiny: Path, tmp_path: Path) -> None:
    wire = Wire(tiny)
    first = Parcel(wire, 0, tmp_path, wire.hear, lambda line: None)
    second = Parcel(wire, 0, tmp_path, wire.hear, lambda line: None)
    assert first.folder.name[-2:] == "-0" and second.folder.name[-2:] == "-1"
    first.close()
    second.close()
    third = Parcel(wire, 0, tmp_path, wire.hear, lambda line: None)
    assert third.folder == first.folder and third.received == 0
    third.close()


def test_a_folder_of_safetensors_is_shipped_too(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="200KB")
    wire = Wire(tmp_path / "model")
    assert len(wire.model.file.paths) > 1
    parcel = receive(wire, tmp_path / "cache", [2, 4])  # the tied output is the embedding's tensor
    with open_model(parcel.path) as file:
        for tensor in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
            theirs = wire.model.file.read(wire.model.file.tensors[tensor])
            assert np.array_equal(theirs, file.read(file.tensors[tensor]))


def test_lists_that_lead_out_of_the_folder_are_refused() -> None:
    fine = Manifest("gguf", "a.gguf", (9,), (4,), (), "ab12")
    assert ship._checked(fine) == ["a.gguf"]
    wrong = [("gguf", "..", (9,), (4,)), ("gguf", "", (9,), (4,)), ("gguf", ".journal", (9,), (4,)),
             ("gguf", "a\\b", (9,), (4,)), ("gguf", "a/a", (9, 9), (4, 4)), ("gguf", "a", (9,), (10,)),
             ("gguf", "a", (9, 1), (4,)), ("zip", "a", (9,), (4,))]  # fmt: skip
    for kind, names, sizes, heads in wrong:
        with pytest.raises(BadMessage):
            ship._checked(Manifest(kind, names, sizes, heads, (), "ab12"))
    for digest, early in (("../x", ()), ("ab", (1, 2))):
        with pytest.raises(BadMessage):
            ship._checked(Manifest("gguf", "a", (9,), (4,), early, digest))


def test_what_is_not_in_the_files_is_not_given(tiny: Path) -> None:
    giver = Wire(tiny).giver
    for which, parts in ((1, ()), (0, (1, 0, 10)), (0, (0, 0, PIECE + 1)), (0, (0, 5))):
        with pytest.raises(BadMessage):
            list(giver.answers(Want(which, parts)))


def test_a_journal_of_files_that_were_cut_is_forgotten_first(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, the next start would believe a journal of holes."""
    file = receive(Wire(tiny), tmp_path, [2]).path
    os.truncate(file, 100)

    def killed(fd: int, size: int) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", killed)
        with pytest.raises(RuntimeError):
            receive(Wire(tiny), tmp_path, [2])
    os.truncate(file, tiny.stat().st_size)
    again = receive(Wire(tiny), tmp_path, [2])
    assert again.path == file and again.received


def test_a_file_that_is_gone_is_told(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    wire = Wire(copy)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    wire.fail = told.put  # type: ignore[method-assign]
    giver = Giver(wire, [wire.model.file])
    copy.unlink()
    try:
        wire.asked(1, Want(0, ()))  # type: ignore[attr-defined]
        assert "can't be given to rank 1" in str(told.get(timeout=120))
    finally:
        giver.close()


def test_messages_come_back() -> None:
    part = Part(1, 2, 1 << 40, b"s" * 16, b"data")
    for said in (Want(0, (1, 2, 3)), Manifest("hf", "a/b", (1, 2), (1, 1), (), "ab")):
        assert handshake.unpack(handshake.pack(said)) == said
    back = handshake.unpack(handshake.pack(part))
    assert isinstance(back, Part) and bytes(back.data) == b"data" and back.offset == 1 << 40
    with pytest.raises(BadMessage):
        handshake.unpack(handshake.pack(Part(0, 0, 0, b"s" * 16, bytes(handshake.PART + 1))))


def test_the_nearest_is_asked() -> None:
    hosts = ["a", "b", "b", "c", "d"]
    assert [nearest(i, hosts, [0, 1]) for i in (2, 3, 4)] == [1, 1, 0]


# --- over MPI ---------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "prompts": ["hello world", "abc" * 30], "max_tokens": 16, "samplings": [{}, {"temperature": 0.8, "seed": 3}],
}  # fmt: skip


def ranks(files: Sequence[Path], folder: Path, asked: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A job of a rank a file -> (the answer, the lines told by those that received)."""
    asked = {**ASKED, **asked, "options": {"ship": True, **asked.get("options", {})}}
    words = [command(1, helpers_mpi.__file__, path, json.dumps(asked)) for path in files]
    line = [*words[0], *(word for more in words[1:] for word in (":", "-n", "1", *more[more.index(sys.executable) :]))]
    env = {**environment(), "HEADRACE_CACHE": str(folder)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["wrong"] == []
    return answer, [line for line in done.stderr.splitlines() if line.startswith("Receiving")]


@needs_mpi
@pytest.mark.slow
def test_ranks_without_the_file_write_the_same_text(tiny: Path, tmp_path: Path) -> None:
    with load(tiny, Options(threads=1, context=512)) as engine:
        alone = tokens_of(engine, ASKED)
    nowhere = tmp_path / "nowhere.gguf"
    answer, told = ranks([tiny, nowhere, tiny, nowhere], tmp_path, {})
    assert answer["tokens"] == alone
    assert len(told) == 4 and sum("layers" in line for line in told) == 2
    answer, told = ranks([tiny, nowhere, nowhere], tmp_path, {"options": {"layer_split": "0.5,0.2,0.3"}})
    assert answer["tokens"] == alone
    answer, told = ranks([tiny, tiny], tmp_path / "empty", {})
    assert answer["tokens"] == alone and not told and not (tmp_path / "empty").exists()


@needs_mpi
@pytest.mark.slow
def test_a_draft_model_is_shipped_to_the_rank_that_drafts(tiny: Path, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path / "draft.gguf", blocks=2, text=True)
    with load(tiny, Options(threads=1, context=512)) as engine:
        alone = tokens_of(engine, ASKED)
    asked = {"options": {"drafter": str(draft)}}
    answer, told = ranks([tiny, tmp_path / "no.gguf", tmp_path / "no.gguf"], tmp_path, asked)
    assert answer["tokens"] == alone and len(told) == 3, "the drafter has its model, and needs the other's description"


@needs_mpi
@pytest.mark.slow
def test_a_rank_with_another_model_is_refused_also_when_shipping(tiny: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other.gguf", blocks=7, seed=1, text=True, ffn=1024)
    words = ("-m", "headrace", "run", "--ship", "--raw", "-t", "1", "-n", "4", "hi", "-m")
    line = [*command(1, *words, tiny), ":", "-n", "1", sys.executable, *words, str(other)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    ours = [line for line in done.stderr.splitlines() if line.startswith("headrace:")]
    assert done.returncode == 2 and len(ours) == 1, done.stderr
    assert ours[0].startswith("headrace: Rank 1 on host ") and "another model file" in ours[0]


COUNTED = """import atexit, os, runpy, sys
from headrace.formats import files
pread, count = files._pread, [0]
def counting(fd, out, offset):
    got = pread(fd, out, offset)
    count[0] += got if os.readlink(f"/proc/self/fd/{fd}") == MODEL else 0
    return got
files._pread = counting
MODEL = os.path.realpath(sys.argv[sys.argv.index("-m") + 1])
try:
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)
finally:
    all_read = int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])
    print("read", os.environ["OMPI_COMM_WORLD_RANK"], count[0], all_read, file=sys.stderr, flush=True)
"""


EDGES = ("--layer-split", "0.3,0.3,0.4")


def reads(model: Path, folder: Path) -> dict[int, tuple[int, int]]:
    """Rank -> bytes read of the model file by our own reader, and of all files and pipes as the system counts them."""
    counted = folder / "counted.py"
    counted.write_text(COUNTED)
    done = helpers_mpi.mpirun(
        3, counted, "run", "-m", model, "--raw", "-t", "1", "-n", "2", "-c", "64", *EDGES, "hi", timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("read ")]
    return {int(rank): (int(ours), int(all_)) for _, rank, ours, all_ in lines}


@needs_mpi
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no reads")
def test_each_rank_reads_its_share_of_the_file(tmp_path: Path) -> None:
    """Share: the tensors of its layers and the file's description. The system's count is compared with the same job
    over a model of next to nothing, which reads the same libraries."""
    path = smollm2()
    with open_model(path) as file:
        model = load_model(file)
        head = min(t.offset for t in file.tensors.values())
    edges, _ = over_ranks(model.layers, None, EDGES[1], 3)
    small, big = reads(tiny_model(tmp_path / "tiny.gguf", blocks=7, text=True), tmp_path), reads(path, tmp_path)
    for rank, (first, end) in enumerate(edges):
        share = head + sum(nbytes for _, _, nbytes in places_of(model, range(first, end)))
        ours, all_ = big[rank]
        assert share <= ours <= 1.02 * share
        assert all_ - small[rank][1] <= 1.02 * share + (1 << 20)
    # Three descriptions, and twice the table that embedding and output share.
    assert sum(ours for ours, _ in big.values()) < 1.6 * path.stat().st_size


def test_one_process_has_nothing_to_ship(tiny: Path) -> None:
    from headrace.errors import BadRequest

    with pytest.raises(BadRequest, match="--ship is for several ranks"):
        load(tiny, Options(ship=True))
