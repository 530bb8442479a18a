"""``headrace pull`` and ``headrace cache`` against a hub on this machine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import Config
from headrace.errors import BadFile, BadRequest, Unavailable
from headrace.store import cache, hub, transfer
from helpers_hub import Hub, serving

BIG = random.Random(0).randbytes(300_000)
LLAMA = (
    b'{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99,'
    b' "num_attention_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}'
)
FILES = {
    "README.md": b"hello",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 900,
    "model.safetensors": BIG,
    "pytorch_model.bin": b"never" * 500,
    "../../escape.safetensors": b"x" * 2000,
}


@pytest.fixture
def server() -> Iterator[Hub]:
    with serving("org/model", FILES) as running:
        yield running


@pytest.fixture
def settings(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(transfer.fetch, "__defaults__", (0.0,))  # no pauses between tries
    return Config(tmp_path / "cache", hub=server.url)


def pull(settings: Config, name: str = "hf:org/model") -> Path:
    return hub.pull(hub.parse(name), settings, lambda *_: None)


def test_a_folder_arrives_whole_and_nothing_else(
    server: Hub, settings: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "hf:org/model"]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert "3 files" in err
    got = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != cache.LOCK}
    assert got == {name: FILES[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert hub.cached(hub.parse("hf:org/model"), settings) == folder
    server.asked.clear()
    pull(settings)
    assert server.asked == []  # everything was there


def test_the_hubs_own_client_can_fetch_from_the_fake(server: Hub, tmp_path: Path) -> None:
    theirs = pytest.importorskip("huggingface_hub")
    path = theirs.hf_hub_download(
        "org/model", "model.safetensors", endpoint=server.url, local_dir=tmp_path, token=False
    )
    assert Path(path).read_bytes() == BIG


def test_broken_connections_are_resumed(server: Hub, settings: Config) -> None:
    server.drop_after = [0, 100_000, 50_000, 0, 0, 0, 1]
    folder = pull(settings)
    assert (folder / "model.safetensors").read_bytes() == BIG
    ranges = [wanted for name, wanted, _ in server.asked if name == "model.safetensors"]
    assert ranges == [None, None, "bytes=100000-", *["bytes=150000-"] * 4, "bytes=150001-"]


def test_a_dead_line_is_an_error_and_the_next_pull_goes_on(server: Hub, settings: Config) -> None:
    server.drop_after = [120_000, *[0] * transfer.TRIES]
    with pytest.raises(Unavailable, match="goes on where it stopped"):
        pull(settings)
    assert hub.cached(hub.parse("hf:org/model"), settings) is None
    [entry] = cache.entries(settings.cache)
    assert entry.partial and entry.nbytes >= 120_000
    server.asked.clear()
    folder = pull(settings)
    assert server.asked[0] == ("model.safetensors", "bytes=120000-", None)
    assert (folder / "model.safetensors").read_bytes() == BIG


def test_a_killed_pull_is_resumed_by_the_next(server: Hub, settings: Config) -> None:
    server.drop_after = [200_000, *[0] * 100]
    child = subprocess.Popen(
        [sys.executable, "-m", "headrace", "pull", "hf:org/model"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    part = settings.cache / "hub/org/model/model.safetensors.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size >= 200_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    server.drop_after.clear()
    server.asked.clear()
    folder = pull(settings)
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert [wanted for name, wanted, _ in server.asked if name == "model.safetensors"] == ["bytes=200000-"]


def test_a_server_that_cannot_resume_is_read_from_the_start(server: Hub, settings: Config) -> None:
    server.ranges = False
    server.drop_after = [100_000]
    assert (pull(settings) / "model.safetensors").read_bytes() == BIG


def test_wrong_bytes_are_refused_and_not_kept(server: Hub, settings: Config) -> None:
    server.damage = True
    with pytest.raises(BadFile, match="not kept"):
        pull(settings)
    folder = settings.cache / "hub/org/model"
    assert not (folder / "model.safetensors").exists()
    assert not list(folder.glob("*.part"))
    server.damage = False
    assert (pull(settings) / "model.safetensors").read_bytes() == BIG


def test_a_file_changed_on_disk_is_fetched_again(server: Hub, settings: Config) -> None:
    path = pull(settings) / "config.json"
    path.write_bytes(b'{"model_type": "LLAMA"}')
    pull(settings)
    assert path.read_bytes() == FILES["config.json"]


def test_the_token_goes_to_the_hub_and_not_to_the_file_store(
    server: Hub, settings: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.token = "hf_secret"
    assert main(["pull", "hf:org/model"]) == 2
    assert "HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["pull", "hf:org/model"]) == 0
    assert server.asked and all(authorization is None for _, _, authorization in server.asked)


def test_no_room_is_said_before_anything_comes(server: Hub, settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1000)
    with pytest.raises(Unavailable, match="0 MB free"):
        pull(settings)
    assert server.asked == []


def test_a_full_disk_halfway_is_one_sentence(settings: Config) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    folder = settings.cache / "hub/org/model"
    folder.mkdir(parents=True)
    (folder / "config.json.part").symlink_to(full)
    with pytest.raises(Unavailable, match="disk is full"):
        pull(settings)


def test_an_unwritable_cache_is_one_sentence(server: Hub, settings: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="set HEADRACE_CACHE"):
        pull(Config(tmp_path / "file" / "cache", hub=server.url))


def test_the_second_of_two_at_once_waits_and_has_what_the_first_brought(settings: Config, server: Hub) -> None:
    """Also when the first one's folder is removed meanwhile; removing itself doesn't wait."""
    here, name = settings.cache / "hub/org/model", hub.parse("hf:org/model")
    said: list[str] = []
    found: list[Path] = []
    with cache.locked(here):
        second = threading.Thread(target=lambda: found.append(hub.pull(name, settings, lambda *_: None, said.append)))
        second.start()
        while not said:
            time.sleep(0.01)
        with pytest.raises(Unavailable, match="another process"), cache.locked(here):
            pass
        shutil.rmtree(here)
    second.join(60)
    assert "waiting for it" in said[0] and found and found[0].exists()
    with cache.locked(here):
        pass


def test_list_and_remove(settings: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pull(settings)
    assert main(["cache"]) == 0
    assert "hf:org/model" in capsys.readouterr().out
    assert main(["cache", "remove", "hf:org/model"]) == 0
    assert not folder.exists()
    assert main(["cache", "remove", "hf:org/model"]) == 2


def test_inspect_of_a_model_on_the_hub_fetches_its_configuration_only(
    server: Hub, settings: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files = {**FILES, "config.json": LLAMA}
    assert main(["inspect", "hf:org/model"]) == 0
    assert "none here" in capsys.readouterr().out
    assert server.asked == [] and cache.entries(settings.cache) == []
    server.files = {"m.gguf": BIG}
    assert main(["inspect", "hf:org/model"]) == 2
    assert "isn't here yet" in capsys.readouterr().err and server.asked == []


SIZES = {"a-Q4_K_M.gguf": 5, "a-Q8_0.gguf": 8, "b-00001-of-00002.gguf": 3, "b-00002-of-00002.gguf": 3}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("hf:o/r:a-Q8_0.gguf", ["a-Q8_0.gguf"]),
        ("hf:o/r:q4_k_m", ["a-Q4_K_M.gguf"]),
        ("hf:o/r:b", ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]),
        ("hf:o/r:b-00002-of-00002.gguf", ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]),
    ],
)
def test_choosing_a_gguf_file(name: str, files: list[str]) -> None:
    assert hub.choose(hub.parse(name), SIZES) == files


@pytest.mark.parametrize(("name", "said"), [("hf:o/r", "several models"), ("hf:o/r:Q5", "no GGUF file matching")])
def test_a_choice_that_is_none(name: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        hub.choose(hub.parse(name), SIZES)


@pytest.mark.parametrize("text", ["hf:", "hf:a", "hf:../b", "hf:a/b/c", "hf:a/b:", "hf:a/..", "hf: a/b"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest):
        hub.parse(text)


def test_an_answer_that_is_no_listing(server: Hub, settings: Config) -> None:
    with serving("org/model", {}) as other:
        other.repo = "org"  # answers the listing's address with something else
        with pytest.raises(BadRequest, match="nothing to fetch"):
            pull(Config(settings.cache, hub=other.url))
    with pytest.raises(Unavailable, match="can't be reached"):
        pull(Config(settings.cache, hub=other.url))
    with pytest.raises(Unavailable, match="has no /api/models"):
        hub.pull(hub.parse("hf:org/other"), settings, lambda *_: None)
