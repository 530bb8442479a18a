"""``headrace simulate`` and its cluster files: what they say is what is simulated, mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import BadFile, BadRequest
from headrace.simulate.acceptance import Acceptance, Recorded
from headrace.simulate.cluster import GPU_CURVE, Cluster, Curve
from headrace.simulate.files import Sizes, by_count, by_file, load_cluster, load_ranks
from headrace.simulate.network import LinkSpec

EXAMPLE = Path(__file__).resolve().parent.parent / "benchmarks" / "data" / "eight_nodes.toml"
MODEL = Sizes("model", 10, 512, 1e9)


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text)
    return file


def test_measured_times_need_no_model(tmp_path: Path) -> None:
    text = 'layers = [3, 2]\nlayer_time = 0.01\ncurve = "gpu"\n[link]\nlatency = 1e-4\nrate = 1e9\n'
    assert load_cluster(written(tmp_path, text)) == Cluster((3, 2), (0.01, 0.01), GPU_CURVE, LinkSpec(1e-4, 1e9))


def test_rates_share_the_layers_out_by_speed(tmp_path: Path) -> None:
    file = written(tmp_path, "rate = [4e9, 1e9]\ndraft_rate = 2e9\ncurve = [[1, 1], [8, 1.5]]\n")
    made = load_cluster(file, MODEL, Sizes("draft", 4, 256, 1e8))
    assert made.layers == (8, 2) and made.width == 512 and made.draft_time == pytest.approx(0.05)
    assert made.layer_time == pytest.approx((0.025, 0.1)) and made.curve == Curve(((1, 1.0), (8, 1.5)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = [3]", "either rate .* or layer_time"),
        ("layers = [3]\nlayer_time = 1.0\nlayer = 2", "unknown fields"),
        ("layers = [10, 0]\nlayer_time = 1.0", "positive"),
        ("layers = [10]\nlayer_time = -1.0", "layer_time must be positive"),
        ("layers = [10]\nlayer_time = 'long'", "wrong kind"),
        ("layers = [10]\nlayer_time = 1.0\ncurve = 'fast'", "fast"),
        ("layers = [10]\nlayer_time = 1.0\ncurve = [[1, 1.0], [1, 2.0]]", "rises"),
        ("layers = [3, 4]\nrate = [1e9]", "how many nodes"),
        ("layers = [3, 4]\nrate = 1e9", "hold 7 layers and model has 10"),
        ("nodes = 11\nrate = 1e9", "10 layers, fewer"),
        ("nodes = 2\nrate = 1e9\n[link]\nspeed = 3", "link"),
        ("nodes = 2\nrate = 1e9\n[link]\nrate = 0", "positive rate"),
        ("nodes = 2\nrate = [1e9, 1e9]", "draft_rate"),
        ("nodes = 2\nrate = 1e9\ndraft_time = 0.1", "leave draft_rate and --draft out"),
        ("layers = [", "TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadFile, match=said):
        load_cluster(written(tmp_path, text), MODEL, MODEL)
    with pytest.raises(BadFile, match=r"none\.toml"):
        load_cluster(tmp_path / "none.toml")


def test_models_by_count_and_by_configuration(tmp_path: Path) -> None:
    assert by_count("70B", 4.0) == Sizes("70B", 80, 8192, 35e9)
    small = by_count("1.1B", 16)
    assert small is not None and 18 <= small.layers <= 24 and small.nbytes == pytest.approx(2.2e9)
    assert by_count("model.gguf", 4) is None
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6,
        "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = by_file(tmp_path / "config.json", 16)
    block = 4 * 256 * 256 + 3 * 256 * 512
    assert (sizes.layers, sizes.width) == (6, 256)
    assert sizes.nbytes == pytest.approx(2 * (6 * block + 1000 * 256), rel=0.02)


def test_acceptance_is_a_number_or_a_recording(tmp_path: Path) -> None:
    assert load_ranks("0.5", 3) == Acceptance(0.5, 3)
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({"ranks": [0, -1], "probabilities": [[0.9, 0.1], [0.5]]}))
    assert load_ranks(str(file), 0) == Recorded([0, -1], [[0.9, 0.1], [0.5]])
    for text in ("1.5", "-1"):
        with pytest.raises(BadRequest, match="share"):
            load_ranks(text, 0)
    for data in ({"ranks": [1], "probabilities": [[0.5]]}, {"ranks": []}, []):
        file.write_text(json.dumps(data))
        with pytest.raises(BadFile, match=r"pair\.json"):
            load_ranks(str(file), 0)
    with pytest.raises(BadFile, match="neither"):
        load_ranks("nine", 0)


PAIR = ("--model", "70B", "--draft", "1.1B", "--acceptance", "0.7", "-n", "24")


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "lanes.html"
    policies = "ours,plain,sync,pipeinfer"
    assert main(["simulate", str(EXAMPLE), *PAIR, "--policy", policies, "--json", "--timeline", str(page)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cluster"]["layers"] == [12, 12, 12, 12, 12, 12, 8]
    by_name = {run["strategy"].split()[0]: run for run in answer["runs"]}
    ours, plain = by_name["ours"], by_name["plain"]
    assert ours["rate"] > 1.5 * plain["rate"] and len(ours["busy"]) == 8 and len(plain["busy"]) == 7
    assert plain["itl50"] == pytest.approx(plain["itl95"]) and plain["launched"] == 0
    assert ours["launched"] >= ours["accepted"] > 0 and 0 < ours["bubble"] < plain["bubble"] < 1
    assert ours["hop_bytes"] > plain["hop_bytes"] > 4 * 8192
    assert page.read_text().count("<svg") == 4


def test_the_command_draws_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, lanes = tmp_path / "trace.json", tmp_path / "lanes.svg"
    words = ["--policy", "sync", "--draft-tokens", "2", "--trace", str(trace), "--timeline", str(lanes)]
    assert main(["simulate", str(EXAMPLE), *PAIR, *words]) == 0
    out = capsys.readouterr().out
    assert "sync depth 2" in out and "tokens/s" in out and "bubble" in out
    assert {"compute", "partly wasted", "bubble"} <= {
        e.get("cat") for e in json.loads(trace.read_text())["traceEvents"]
    }
    assert lanes.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "70B", "--acceptance", "0.7"], "needs a drafter"),
        (["--model", "70B", "--draft", "1B"], "Give --acceptance"),
        (["--draft", "1B", "--acceptance", "0.7"], "the model must be known"),
        ([*PAIR, "--policy", "best"], "'best' is no policy"),
        ([*PAIR, "--policy", "plain"], "leave --draft and --acceptance out"),
        ([*PAIR, "--draft-tokens", "4"], "ours measures"),
        ([*PAIR, "--policy", "ours,sync", "--trace", "x.json"], "give one policy"),
        ([*PAIR, "--timeline", "x.png"], "x.png"),
        ([*PAIR, "--acceptance", "2"], "share"),
        ([*PAIR, "--bits", "0"], "out of range"),
        (["--model", "none.gguf", "--draft", "1B", "--acceptance", "0.7"], "none.gguf"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(EXAMPLE), *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""
