"""PipeInfer's command line: its README's command runs; each option does what it says, or is refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import generation, speculative
from headrace.cli.main import main
from headrace.engine import Options, load
from headrace.run.tree import Node
from headrace.run.types import Draft
from headrace.speculate.pipeinfer import Microbatches, PipeInfer
from helpers_mpi import environment, mpirun, needs_mpi
from helpers_tiny import tiny_model

PROMPT = "hello world hello world"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target of ten blocks, draft of two that shares nothing with it)."""
    folder = tmp_path_factory.mktemp("pipeinfer")
    return (
        tiny_model(folder / "big.gguf", blocks=10, text=True),
        tiny_model(folder / "tiny.gguf", blocks=2, seed=5, text=True),
    )


def run(capfd: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert main([str(word) for word in argv]) == status, capfd.readouterr().err
    return capfd.readouterr().out


@needs_mpi
def test_the_command_of_its_readme(
    models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    big, tiny = models
    (tmp_path / "prompt.txt").write_text(r"hello\tworld\n" + "\n")
    argv = (
        f"-md {tiny} -m {big} -e -f {tmp_path}/prompt.txt -n 24 --mpi-layer-split 0.1,0.4,0.5/1.0 --ignore-eos "
        "--temp -1.0 --repeat-last-n 0 --draft 4 -tb 1,2,1,1 -t 1,1,2,1 -c 512 -pa 0.001 -ps 0.8 --numa -pr 0.4 "
        "-pd 0.01 -np 3"
    )
    done = mpirun(4, "-m", "headrace", "speculative", *argv.split())
    assert done.returncode == 0, done.stderr
    (tmp_path / "plain.txt").write_text("hello\tworld\n\n")
    plain = run(capfd, "run", "-m", big, "--raw", "-f", tmp_path / "plain.txt", "-n", 24, "--ignore-eos", "-t", 1)
    assert done.stdout == plain


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Node]]]:
    """The trees the head was offered, as PipeInfer's policy hears of them."""
    found: list[list[Node]] = []
    drafted = PipeInfer.drafted

    def note(self: PipeInfer, seq: int, draft: Draft, fresh: list[Node], now: float) -> None:
        found.append(list(fresh))
        drafted(self, seq, draft, fresh, now)

    monkeypatch.setattr(PipeInfer, "drafted", note)
    yield found


COMMON = ("-n", 48, "--ignore-eos", "-t", 1, "-c", 256, "-p", PROMPT)


def test_draft_and_np_bound_a_tree(
    models: tuple[Path, Path], capfd: pytest.CaptureFixture[str], drafts: list[list[Node]]
) -> None:
    big, tiny = models
    run(capfd, "speculative", "-m", big, "-md", tiny, *COMMON, "-pa", 0, "-ps", 0, "--draft", 5, "-np", 3)
    sizes = [len(nodes) for nodes in drafts]
    assert max(sizes) == 5
    for nodes in drafts:
        ends = [n for n in nodes if not any(other.parent is n for other in nodes)]
        assert len(ends) <= 3
    assert any(sum(n.rank > 0 for n in nodes) for nodes in drafts)


def test_pa_stops_a_branch_and_ps_splits_it(
    models: tuple[Path, Path], capfd: pytest.CaptureFixture[str], drafts: list[list[Node]]
) -> None:
    big, tiny = models
    run(capfd, "speculative", "-m", big, "-md", tiny, *COMMON, "-pa", 0.03, "-ps", 0.02, "-np", 4, "--draft", 8)
    nodes = [n for tree in drafts for n in tree]
    first, others = [n for n in nodes if n.rank == 0], [n for n in nodes if n.rank > 0]
    assert first and min(n.probability for n in first) >= 0.03
    assert all(n.probability > 0.02 for n in others)
    drafts.clear()
    run(capfd, "speculative", "-m", big, "-md", tiny, *COMMON, "-pa", 1, "-ps", 0.02)
    assert not any(drafts)


def test_pr_and_pd_move_the_cutoff(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cutoff at each tree is -pa, raised by -pr with each tree made and lowered by -pd with each that wasn't."""
    seen: list[tuple[float, int, int]] = []
    cutoff = Microbatches.cutoff

    def note(self: Microbatches, made: int, missed: int) -> float:
        seen.append((cutoff(self, made, missed), made, missed))
        return seen[-1][0]

    monkeypatch.setattr(Microbatches, "cutoff", note)
    big, tiny = models
    knobs = {"draft": 4, "pa": 0.9, "pr": 0.2, "pd": 0.05}
    with load(big, Options(threads=1, context=256, drafter=tiny, policy="pipeinfer", knobs=knobs)) as engine:
        engine.generate([PROMPT], max_tokens=40, ignore_eos=True)
    assert all(abs(value - (0.9 + 0.2 * made - 0.05 * missed)) < 1e-12 for value, made, missed in seen)
    assert any(made for _, made, _ in seen) and any(missed for _, _, missed in seen)


def test_threads_are_as_many_as_asked(models: tuple[Path, Path]) -> None:
    def threads() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    before = threads()
    with load(models[0], Options(threads=2, batch_threads=(4,), context=64)) as engine:
        assert threads() - before == 1 + 3
        several = engine.generate([PROMPT, "x"], max_tokens=8, ignore_eos=True)
    with load(models[0], Options(threads=1, context=64)) as engine:
        assert threads() == before
        assert [d.tokens for d in engine.generate([PROMPT, "x"], max_tokens=8, ignore_eos=True)] == [
            d.tokens for d in several
        ]


WATCHED = """
import sys
from headrace.cli.main import main
from headrace.engine import Engine
def close(self):
    maps = open("/proc/self/maps").read()
    print("mapped", sys.argv[1] in maps, file=sys.stderr)
    big = [line for line in open("/proc/self/numa_maps") if "anon=" in line]
    print("spread", all("interleave" in line for line in big[-5:]), file=sys.stderr)
Engine.close = close
sys.exit(main(["speculative", "-m", sys.argv[1], "-n", "4", "-p", "x", *sys.argv[2:]]))
"""


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel tells nothing of NUMA")
@pytest.mark.parametrize("numa", [False, True])
def test_numa_spreads_memory_and_nothing_is_mapped(models: tuple[Path, Path], numa: bool) -> None:
    words = [sys.executable, "-c", WATCHED, str(models[0]), "--no-mmap", *(["--numa"] if numa else [])]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "mapped False" in done.stderr
    assert f"spread {numa}" in done.stderr


def test_prompt_file_escapes_length_temperature(
    models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """-e -f -n -c --temp -1 --repeat-last-n --ignore-eos, with and without another name."""
    big, _ = models
    (tmp_path / "p").write_text(r"a\nb")
    plain = run(capfd, "run", "--raw", "-m", big, "-t", 1, "-n", 12, "--ignore-eos", "a\nb")
    same = ("speculative", "-m", big, "-t", 1, "--temp", "-1", "--ignore-eos")
    assert run(capfd, *same, "-e", "-f", tmp_path / "p", "--n-predict", 12, "--ctx-size", 64) == plain
    assert run(capfd, *same, "-e", "-p", r"a\nb", "-n", 12, "--repeat-penalty", 2, "--repeat-last-n", 0) == plain
    assert run(capfd, *same, "-p", "a\nb", "-n", 12, "--repeat-penalty", 2, "--repeat-last-n", -1) != plain
    assert run(capfd, *same, "-p", r"a\nb", "-n", 12) != plain
    assert "context" in refused(capfd, *same, "-c", 16, "-p", "x" * 20)


def refused(capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("headrace: ") and err.count("\n") == 1
    return err


def test_every_other_option_is_refused_with_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    for why, flags in speculative.REFUSED.items():
        for flag in flags:
            err = refused(capfd, "speculative", "-m", "none.gguf", flag, "1")
            assert err.startswith(f"headrace: {flag} isn't offered: {why}")


def test_its_knobs_choose_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Options] = []

    class Enough(Exception):
        pass

    def stop(path: Path, options: Options, **_: Any) -> None:
        chosen.append(options)
        raise Enough

    monkeypatch.setattr("headrace.engine.load", stop)
    monkeypatch.setattr(generation, "find_named", lambda name, args: Path(str(name)))
    cases: list[tuple[tuple[str, ...], str]] = [
        (("-md", "d", "-pr", "0.4"), "pipeinfer"),
        (("-md", "d", "-ps", "0.8"), "pipeinfer"),
        (("-md", "d", "-np", "3", "--draft", "4", "-pa", "0.1"), "ours"),
        (("-md", "d", "-pa", "0.1", "--policy", "pipeinfer"), "pipeinfer"),
    ]
    for flags, policy in cases:
        with pytest.raises(Enough):
            main(["speculative", "-m", "m", *flags, "-p", "x"])
        assert chosen[-1].policy == policy and chosen[-1].drafter == (Path("d"),)
