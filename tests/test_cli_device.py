"""Options for devices on the command line: what they do, and what is refused and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from helpers_chat import read_rows, row, write_rows
from helpers_tiny import tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("device") / "t.gguf", "Q8_0", blocks=4, text=True)


def run(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> tuple[str, str]:
    code = main(line.split())
    out, err = capsys.readouterr()
    assert code == status, err
    return out, err


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    err = run(capsys, line, 2)[1]
    assert len(err.strip().splitlines()) == 1
    return err


def test_a_device_in_pytorch_and_its_tiers(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    base = f"run -m {path} --raw -c 128 -n 6 -t 1 abcdefg --json"
    whole = run(capsys, f"{base} --device torch:cpu")[0]
    tight = run(capsys, f"{base} --device torch:cpu --device-ram 54M --link 200M")[0]
    disk = run(capsys, f"{base} --device torch:cpu --kv-disk {tmp_path}")[0]
    assert len({json.loads(out)["text"] for out in (whole, tight, disk)}) == 1
    assert "budget is 1 MiB" in refused(capsys, f"{base} --device torch:cpu --device-ram 1M")


def test_batch_and_bench_tell_of_the_link(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rows = [row(f"r{i}", {"prompt": f"the {i}th of several", "max_tokens": 5}) for i in range(5)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    texts = []
    for number, more in enumerate(("", "--device-ram 60M --link 300M")):
        out = tmp_path / f"out{number}.jsonl"
        line = f"batch {source} -o {out} --any-model -m {path} -c 64 -t 1 --rows 16 --device torch:cpu {more}"
        err = run(capsys, line)[1]
        assert "5/5 rows" in err and "over the link" in err and "waiting for the disk or link" in err
        texts.append([r["response"]["body"]["choices"][0]["text"] for r in read_rows(out)])
    assert texts[0] == texts[1]
    bench = f"bench {path} -t 1 --prefill 8 --depth 1 --rows 2 -n 3 --rounds 1 --device torch:cpu --json"
    assert json.loads(run(capsys, bench)[0])["kernels"] == "torch:cpu"


def test_sparse_attention_by_name(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "x" * 60, "max_tokens": 3})])
    names = []
    for number, more in enumerate(("", "--attn-sparsity 0.25")):
        out = tmp_path / f"out{number}.jsonl"
        run(capsys, f"batch {source} -o {out} --any-model -m {path} -c 128 -t 1 {more}")
        names.append(read_rows(out)[0]["response"]["body"]["model"])
    assert names == ["t", "t-sparse0.25"]
    assert "isn't this job's output" in refused(
        capsys, f"batch {source} -o {tmp_path / 'out0.jsonl'} --any-model -m {path} -c 128 --attn-sparsity 0.25"
    )


def test_refusals(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"run -m {path} --raw x"
    assert "--link is for a device with memory of its own; add --device" in refused(capsys, f"{base} --link 1G")
    assert "--device-ram is for a device" in refused(capsys, f"{base} --device-ram 1G")
    assert "--host-device is for a device" in refused(capsys, f"{base} --host-device cpu")
    assert "there is nothing to pin" in refused(capsys, f"{base} --pin-weight --device torch:cpu")
    assert "invalid choice: 'tpu'" in refused(capsys, f"{base} --device tpu")
    assert "over 0 and at most 1" in refused(capsys, f"{base} --attn-sparsity 0")


def test_without_pytorch_the_remedy_is_told(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [m for m in sys.modules if m.startswith("headrace.kernels.torch_")]:
        monkeypatch.delitem(sys.modules, name)
    for device in ("torch:cpu", "cuda"):
        err = refused(capsys, f"run -m {path} --raw x --device {device}")
        assert f"The device {device} needs PyTorch" in err and "pip install headrace[torch]" in err
