"""``headrace plan`` and ``pack``; --plan, --ram and what was predicted, in the commands that run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import measured
from headrace.cli.main import main
from headrace.cli.planned import outlook
from headrace.plan.machine import Machine
from headrace.plan.plan import Plan
from helpers_tiny import tiny_model
from test_plan_real import a_machine

WORK = ["--prompt-len", "32", "--gen-len", "8", "--batch", "8", "-c", "96"]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "machine.json").write_text(a_machine().to_json())
    return str(tiny_model(folder / "big.gguf", fmt="F32", blocks=32, ffn=768, text=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def machine(big: str) -> list[str]:
    return ["--machine", str(Path(big).with_name("machine.json"))]


def said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert main(list(argv)) == status, capsys.readouterr().err
    out, err = capsys.readouterr()
    return out, err


def least(capsys: pytest.CaptureFixture[str], big: str, machine: list[str]) -> int:
    """MiB that the program takes with its weights, so that a little less makes some stream."""
    out, _ = said(capsys, "plan", big, "--ram", "1G", *WORK, *machine, "--json")
    host = json.loads(out)["prediction"]["bytes"]["host"]
    return int(sum(host.values()) >> 20)


def test_a_plan_is_printed_written_and_run(
    big: str, machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ram = f"{least(capsys, big, machine) - 24}M"
    file = str(tmp_path / "plan.json")
    out, err = said(capsys, "plan", big, "--ram", ram, *WORK, *machine, "-o", file)
    for part in ("tokens/s", "first token after", "binds", "Next best:", "x the time", "What would help:",
                 "+1 GB of memory", "disk twice as fast", "streaming buffers", "sequences at a time"):  # fmt: skip
        assert part in out
    assert file in err
    whole = json.loads(said(capsys, "plan", big, "--ram", ram, *WORK, *machine, "--json")[0])
    assert whole["plan"].keys() == json.loads(Path(file).read_text()).keys()
    assert len(whole["others"]) == 5 and set(whole["gains"]) == {"+1 GB of memory", "disk twice as fast"}
    plan = Plan.from_json(Path(file).read_text())
    assert any(p.streams for p in plan.places)
    common = ["run", "-m", big, "-c", "96", "--raw", "-n", "6", "--ignore-eos", "--json", "abc"]
    texts, ram = {}, f"{least(capsys, big, machine) - 24}M"
    for name, more in (("plain", []), ("plan", ["--plan", file, *machine]), ("ram", ["--ram", ram, *machine])):
        answer = json.loads(said(capsys, *common, *more)[0])
        texts[name] = answer["text"]
        assert ("predicted" in answer["figures"]) == (name != "plain"), name
    assert len(set(texts.values())) == 1
    _, err = said(capsys, *[a for a in common if a != "--json"], "--plan", file, *machine)
    assert "· plan " in err
    short = ["--prefill", "8", "--depth", "1", "--rows", "2", "-n", "3", "--rounds", "1"]
    out, _ = said(capsys, "bench", big, *short, "--ram", ram, *machine)
    assert out.splitlines()[3].split()[-1] == "plan" and all(len(line.split()) > 5 for line in out.splitlines()[4:])
    _, err = said(capsys, *common, "--plan", file, "--kv-bits", "8/4", status=2)
    assert "--kv-bits" in err and len(err.splitlines()) == 1


def test_percent_is_realised(big: str, machine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", big, "--ram", "1G", *WORK, *machine, "--percent", "0", "40", "0", "100", "0", "100"]
    out, _ = said(capsys, *argv)
    assert "comes out as 0.0 40.6 0.0 100.0 0.0 100.0." in out  # 13 of 32 blocks
    out, err = said(capsys, *argv[:-6], "20", "80", "0", "100", "0", "100", status=2)
    assert "--device-ram" in err and not out


def test_a_machine_with_a_device(big: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    t4 = Path(__file__).parent.parent / "benchmarks" / "data" / "t4.json"
    argv = ["plan", big, "--ram", "60M", "--device-ram", "30M", *WORK, "--machine", str(t4)]
    whole = json.loads(said(capsys, *argv, "--json")[0])
    assert whole["solver"] == "HiGHS" and sum(whole["prediction"]["bytes"]["device"].values()) <= 30 << 20
    six = ["--percent", "20", "80", "0", "100", "0", "100"]
    out, _ = said(capsys, *argv[:-2], *argv[-2:], *six)
    assert "comes out as 18.8 81.2 0.0 100.0 0.0 100.0." in out
    _, err = said(capsys, "plan", big, "--device-ram", "30M", *WORK, "--machine",
                  str(Path(big).with_name("machine.json")), status=2)  # fmt: skip
    assert "device" in err


def test_refusals_are_one_line(
    big: str, machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, part in (
        (["plan", big, "--ram", "60M", *machine], "MiB"),
        (["plan", big, "--machine", str(tmp_path / "none.json")], "none.json"),
        (["plan", str(tmp_path / "no.gguf")], "no.gguf"),
        (["plan", big, *machine, "--format", "Q4_K"], "--format"),
        (["run", "-m", big, "--plan", str(tmp_path / "none.json"), "x"], "none.json"),
    ):
        out, err = said(capsys, *argv, status=2)
        assert part in err and len(err.splitlines()) == 1 and not out


def test_packing_ahead(big: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, "pack", big)
    made = Path(out.strip())
    assert made.parent == cache / "packs" and "free there" in err
    again, err = said(capsys, "pack", big)
    assert again == out and "already" in err


def test_probing_prints_and_keeps(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured.probe, "BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(measured.probe, "ROWS", (1, 16))
    monkeypatch.setattr(measured.probe, "WIDTH", 256)
    monkeypatch.setattr(measured, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(measured, "USUAL", ("Q8_0",))
    out, err = said(capsys, "check", "--probe")
    kept = next(cache.glob("machine-*.json"))
    assert Machine.from_json(out) == Machine.from_json(kept.read_text()) and kept.name in err


def test_the_outlook_of_a_batch_file(tmp_path: Path) -> None:
    row = {"custom_id": "a", "body": {"prompt": "x" * 400, "max_tokens": 10}}
    chat = {"body": {"messages": [{"role": "user", "content": "y" * 40}], "max_completion_tokens": 20}}
    ids = {"body": {"prompt": [1, 2, 3], "max_tokens": 30}}
    lines = [json.dumps(row), json.dumps(chat), json.dumps(ids), "", "{bad"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    prompt, new, rows = outlook(tmp_path / "in.jsonl")
    assert rows == 4 and 50 < prompt < 200 and 10 < new < 200
    assert outlook(tmp_path / "none.jsonl")[2] == 1
