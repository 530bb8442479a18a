"""FlexGen's command line on a small OPT made by transformers: the same text wherever everything lies."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from headrace.cli import flexgen as command
from headrace.cli.main import main
from headrace.jobs import flexgen
from headrace.kernels.dispatch import TORCH
from headrace.options import Options
from helpers_text import byte_library

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
BLOCKS = 6
SHORT = "--prompt-len 12 --gen-len 4 --gpu-batch-size 2 --num-gpu-batches 2 "


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as --path names it, with one model in it, in 16 bits."""
    folder = tmp_path_factory.mktemp("opt_weights") / "opt-tiny"
    config = transformers.OPTConfig(
        vocab_size=1216, hidden_size=64, ffn_dim=256, num_hidden_layers=BLOCKS, num_attention_heads=4,
        max_position_embeddings=640, word_embed_proj_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=random)
            p.copy_(0.1 * noise + ("norm.weight" in key) if p.dim() == 1 else noise * 0.3)
    model.half().save_pretrained(folder)
    byte_library().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder.parent


class Run:
    """One command line: its texts and figures by name."""

    def __init__(self, capsys: pytest.CaptureFixture[str], weights: Path, line: str, status: int = 0) -> None:
        torch.set_num_threads(1)
        code = main(["flexgen", "--model", "facebook/opt-tiny", "--path", str(weights), "-t", "1", *line.split()])
        self.out, self.err = capsys.readouterr()
        assert code == status, self.err
        self.texts = re.findall(r"^\d+: (.*)$", self.out, re.MULTILINE)
        self.figures = dict(re.findall(r"([\w ()]+): ([\d.]+|True|False)", self.out))


PERCENTS = [
    "100 0 100 0 100 0",
    "0 100 0 100 0 100",
    "50 50 50 50 100 0",
    "20 80 0 100 0 100",
    "0 50 0 0 0 100",
    "33 33 34 33 0 0",
    "0 0 100 0 100 0",
]


@pytest.mark.parametrize("device", ["torch:cpu", "cpu"])
def test_the_same_text_wherever_everything_lies(
    device: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for percent in PERCENTS:
        run = Run(capsys, weights, f"{SHORT} --device {device} --offload-dir {tmp_path} --percent {percent}")
        assert len(run.texts) == 2 and run.texts[0] != run.texts[1]
        found.append(run.texts)
        real = [float(x) for x in re.findall(r"comes out as ([\d. ]+)\.", run.out)[0].split()]
        asked = [int(x) for x in percent.split()]
        if device == "torch:cpu":
            assert all(abs(a - r) <= 100 / BLOCKS for a, r in zip(asked, real, strict=True)), (asked, real)
        else:
            assert abs(asked[0] + asked[1] - real[1]) <= 100 / BLOCKS and real[0] == real[2] == real[4] == 0
            assert "shares are the host's" in run.err
        disk = "read from disk" in run.out
        assert disk == (device == "torch:cpu" or asked[0] + asked[1] < 100 or asked[2] + asked[3] < 100)
    assert all(texts == found[0] for texts in found)
    plain = Run(
        capsys, weights, f"{SHORT} --device {device} --offload-dir {tmp_path} --overlap 0 --percent 30 30 30 30 0 100"
    )
    assert plain.texts == found[0]


PUBLISHED = [  # facts of its paper and suite: policies of 6.7B, 30B and 175B, lengths and batches divided
    "--gpu-batch-size 2 --overlap False --prompt-len 16 --gen-len 3",
    "--gpu-batch-size 6 --compress-w --compress-c --prompt-len 16 --gen-len 3",
    "--gpu-batch-size 6 --num-gpu-batches 3 --percent 20 80 0 100 0 100 --cpu --prompt-len 16 --gen-len 3",
    "--gpu-batch-size 4 --num-gpu-batches 4 --percent 0 100 0 100 0 100 --compress-cache --prompt-len 16 --gen-len 3",
    "--gpu-batch-size 4 --num-gpu-batches 2 --percent 0 50 0 0 0 100 --cpu --pin-weight 0 --prompt-len 16 --gen-len 3",
    "--gpu-batch-size 6 --num-gpu-batches 3 --percent 0 100 0 100 0 100 --compress-weight --compress-cache "
    "--sep-layer 0 --pin-weight 0 --prompt-len 16 --gen-len 3",
    "--percent 0 100 100 0 100 0 --prompt-len 16 --gen-len 3",
]


@pytest.mark.parametrize(
    "argv", [a if i in (2, 4, 5) else pytest.param(a, marks=SLOW) for i, a in enumerate(PUBLISHED)]
)
def test_published_command_lines(argv: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts: dict[tuple[bool, bool], list[str]] = {}
    for device, exact in product(("torch:cpu", "cpu"), (True, False)):
        more = argv if exact else f"{argv} --percent 100 0 100 0 100 0"
        run = Run(capsys, weights, f"{more} --device {device} --offload-dir {tmp_path}")
        assert float(run.figures["total throughput"]) > 0 and run.figures["projected"] == "False"
        texts[device == "cpu", exact] = run.texts
    assert texts[True, True] == texts[True, False] and texts[False, True] == texts[False, False]


def test_figures_and_logs(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(capsys, weights, f"{SHORT} --device cpu --log-file auto --verbose 1")
    assert not run.texts
    log = (tmp_path / "headrace-opt-tiny-gbs2-ngbs2-prompt12-gen4-percent-100-0-100-0-100-0.log").read_text()
    assert log.strip() == run.out.strip()
    f = {name: float(value) for name, value in run.figures.items() if "latency" in name or "throughput" in name}
    assert f["total latency"] == pytest.approx(f["prefill latency"] + f["decode latency"], abs=0.002)
    rounding = f["total throughput"] * 0.0006 + 0.1  # latencies are printed to the millisecond
    assert f["total throughput"] * f["total latency"] == pytest.approx(4 * 4, abs=rounding)
    cut = Run(capsys, weights, f"{SHORT} --gen-len 20 --cut-gen-len 3 --device cpu --no-log")
    assert cut.figures["projected"] == "True" and len(list(tmp_path.glob("*.log"))) == 1
    assert not Run(capsys, weights, f"{SHORT} --device cpu --verbose 0").out


def test_sparse_attention_is_labelled_and_one_is_exact(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in ("cpu", "torch:cpu"):
        long = f"--prompt-len 400 --gen-len 12 --gpu-batch-size 2 --offload-dir {tmp_path} --device {device}"
        exact, same = Run(capsys, weights, long), Run(capsys, weights, f"{long} --attn-sparsity 1.0")
        sparse = Run(capsys, weights, f"{long} --attn-sparsity 0.1")
        away = Run(capsys, weights, f"{long} --attn-sparsity 0.1 --percent 20 40 0 50 0 100")
        assert same.texts == exact.texts != sparse.texts == away.texts
        assert "An approximation: attention over 10% of the values" in sparse.err and "approximation" not in exact.err
        assert re.search(r"^opt-tiny-sparse0\.1 on ", sparse.out, re.MULTILINE) or "-sparse0.1 on " in sparse.out


REFUSED = {
    "--debug-mode fewer_batch": "--debug-mode is refused",
    "--sep-layer": "--sep-layer is refused",
    "--sep-layer True": "--sep-layer is refused",
    "--pin-weight 1": "--pin-weight is for cuda",
    "--overlap maybe": "neither true nor false",
    "--attn-sparsity 0": "over 0 and at most 1",
    "--percent 10 20": "expected 6 arguments",
    "--percent 60 60 0 100 0 100": "over 100",
    "--percent 0 100 0 100 50 50": "activations lie on one tier",
    "--prompt-len 639": "takes 640",
    "--device cpu --link 1G": "--link is for a device with memory of its own",
    "--gpu-batch 0": "must be 1 or more",
    "--offload-dir /proc/no --percent 0 0 0 0 0 100": "choose another --offload-dir",
    "--no-such-flag": "unrecognized arguments",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_refusals_say_why(argv: str, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, weights, f"{SHORT} {argv}", status=2)
    assert REFUSED[argv] in run.err and len(run.err.strip().splitlines()) == 1


def test_models_are_found_and_flexgens_own_arrays_refused(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opt-1.3b-np").mkdir()
    assert main(["flexgen", "--model", "facebook/opt-1.3b", "--path", str(tmp_path)]) == 2
    assert "arrays that FlexGen converted" in capsys.readouterr().err
    folder = weights / "opt-tiny"
    assert main(["flexgen", "--model", str(folder), "-t", "1", "--device", "cpu", *SHORT.split()]) == 0
    capsys.readouterr()
    asked: list[str] = []
    monkeypatch.setattr(command.g, "find_named", lambda name: asked.append(name) or folder)
    assert main(["flexgen", "-t", "1", "--device", "cpu", *SHORT.split()]) == 0 and asked == ["hf:facebook/opt-6.7b"]


def test_without_pytorch_it_runs_on_the_cpu(
    weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.nearest() in TORCH
    find = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "device cpu." in Run(capsys, weights, SHORT).err


def test_every_flag_is_explained() -> None:
    told = [name for name, _, _ in command.flags()]
    assert told == list(command.HOW)
    asked = (
        "--model --path --offload-dir --prompt-len --gen-len --cut-gen-len --gpu-batch-size --num-gpu-batches "
        "--percent --sep-layer --pin-weight --cpu-cache-compute --attn-sparsity --compress-weight --compress-cache "
        "--overlap --debug-mode --log-file --verbose"
    )
    assert set(asked.split()) <= set(told)


def test_prompts_have_the_length_and_differ(weights: Path, tmp_path: Path) -> None:
    from headrace.engine import load

    policy = flexgen.Policy(3, 2, (0, 100, 0, 100, 0, 100), 30, 5)
    options, _ = flexgen.carried_out(weights / "opt-tiny", policy, tmp_path, Options(threads=1))
    assert (options.nexts, options.runs, options.sequences, options.caches, options.context) == (3, 2, 6, 6, 35)
    with load(weights / "opt-tiny", options) as engine:
        made = flexgen.prompts(engine, policy)
    assert {len(p) for p in made} == {30} and len({tuple(p) for p in made}) == 6
