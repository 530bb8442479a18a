"""Paced ranks: real MPI and real tokens at a cluster's pace, against the simulator's prediction of the same.

    python benchmarks/paced.py [--targets 3,8] [--rounds 5] [--tokens 48] [--layer-ms 6] [--draft-ms 32] [--out FILE]

Every layer of every rank is padded by sleep to ``--layer-ms`` times the CPU's cost curve of its rows, a step of the
drafter to ``--draft-ms`` times it, so that many ranks fit on two cores ("cores": what they used). Target: SmolLM2;
draft: the same with noise in its feed-forward parts (``inflate.py``), which agrees with it at 0.75 +- 0.03 of a text's
places; of some prompts the one whose text is nearest to that is taken. Plain, synchronous, PipeInfer's and our policy
take turns in one job; both others' settings are the simulator's best of some.

The simulator gets the pads, what the draft says on the text and off it, and this machine's overheads, probed before:
a message's way between two ranks after silences of 0 to 200 ms, the handling of a run's message on a stage, what a step
of the drafter took by its rows, and what head and drafter take to think, which a first simulation with their code tells
(``paced_prediction.py``). Nothing is fitted to a result. Prints JSON: tokens/s measured (medians) and predicted, the
error, and whether ours is fastest. About seven minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace import drafting, ensemble
from headrace.cluster.handshake import Ready
from headrace.cluster.members import CONTROL, Member
from headrace.engine import Options, load
from headrace.run.schedule import Order
from headrace.run.stage import Computer
from headrace.simulate.cluster import CPU_CURVE as CURVE
from headrace.speculate.learned import Learned, probe
from model_zoo import smollm2, tell
from paced_prediction import BLOCKS, SILENCES, even, handling, policy_of, predict, settings
from pair import Drafts, noisy, text_of

SLACK = 2e-3
"""Seconds by which a run's layer may begin late and still count from the end of the one before."""
PINGS, LEARNED = 16, 5
"""Pings after each silence, and how many of them until it is learned."""
HEAD = 0.2
"""Of the drafter's step, its output layer's part."""


# --- the ranks --------------------------------------------------------------------------------------------


class Paced(Computer):
    """A computer whose steps take what ``seconds(layer)`` says for one row, times the curve of their rows."""

    def __init__(self, computer: Any, seconds: Callable[[int], float]) -> None:
        self.computer, self.seconds = computer, seconds
        self.end, self.done, self.late = 0.0, 0, 0
        self.last = (-1, -1)
        self.took: dict[int, list[float]] = {}
        """Seconds from the first block to the output, by rows, where a rank has both."""
        self._first = (0.0, -1)

    def step(self, layer: int, run: Any) -> None:
        now = time.monotonic()
        began = self.end if self.last == (run.id, layer - 1) and now - self.end < SLACK else now
        self.last = (run.id, layer)
        rows = len(run.live)
        if layer == 0:
            self._first = now, rows
        self.computer.step(layer, run)
        self.end = began + self.seconds(layer) * CURVE(rows)
        left = self.end - time.monotonic()
        self.done += 1
        self.late += left < 0
        if left > 0:
            time.sleep(left)
        if layer == BLOCKS + 1 and self._first[1] == rows:
            self.took.setdefault(rows, []).append(time.monotonic() - self._first[0])


class Switched:
    """The drafter of each strategy; a sequence's number says whose turn it is. Never is anything of two under way."""

    def __init__(self, drafters: Sequence[Any]) -> None:
        self.drafters = list(drafters)
        self.now: Any = None

    def on_event(self, event: Any, now: float) -> Any:
        if getattr(event, "start", None) == 0 and not event.over:
            chosen = self.drafters[event.seq % len(self.drafters)]
            if self.now is not None:
                chosen._run = max(chosen._run, self.now._run)  # a stage takes runs in rising order only
            self.now = chosen
        return self.now.on_event(event, now)


def draft_seconds(total: float) -> Callable[[int], float]:
    return lambda layer: total * (HEAD if layer == BLOCKS + 1 else (1 - HEAD) / (BLOCKS + 1))


def pings(link: Any) -> list[list[float]]:
    """Seconds of a message's way to rank 1 after each of the silences, once it is learned; rank 1 answers."""
    found, back = [], 0.0
    for silence in SILENCES:
        took = []
        for _ in range(PINGS):
            time.sleep(silence)
            start = time.monotonic()
            link.send(1, CONTROL, Ready(1))
            hear(link)
            took.append(time.monotonic() - start)
        back = back or statistics.median(took[LEARNED:]) / 2
        found.append([seconds - back for seconds in took[LEARNED:]])
    return found


def hear(link: Any) -> None:
    while link.receive() is None:
        link.wait(1.0)


def rank(path: Path) -> int:
    from headrace.cluster.mpi import join

    job = json.loads(path.read_text())
    wishes = [drafting.Wish(model=Path(job["draft"]), policy=p, knobs=k) for p, k in job["strategies"]]
    each, total = job["layer"], job["draft_step"]
    options = Options(
        threads=1, rank_threads=(1,), context=256, drafter=job["draft"], layer_split=job["split"], sequences=1, rows=64
    )
    with join() as link:
        (path.parent / f"pid{link.rank}").write_text(str(os.getpid()))
        if link.rank:
            if link.rank == 1:
                for _ in range(PINGS * len(SILENCES)):
                    hear(link)
                    link.send(0, CONTROL, Ready(1))
            ensemble.Member = paced_member(each, total, path.parent)  # type: ignore[attr-defined]
            real = drafting.drafter_of
            drafting.drafter_of = lambda wish, draft, policy=None: Switched([real(w, draft) for w in wishes])
            return ensemble.serve(lambda: Path(job["model"]), options, link)
        ways = pings(link)
        with load(job["model"], options, link=link) as engine:
            stage, computer = engine.parts.loop.stages[0]
            paced = Paced(computer, lambda _: each)
            engine.parts.loop.stages = [(stage, paced)]
            print(json.dumps({"ways": ways, **lead(engine, wishes, job, path.parent, paced)}), flush=True)
    return 0


def paced_member(each: float, total: float, folder: Path) -> type[Member]:
    class Padded(Member):
        def __init__(self, link: Any, ranks: Any, number: int, stage: Any, targets: int, *more: Any) -> None:
            self.paced = Paced(stage[1], draft_seconds(total) if number >= targets else lambda _: each)
            super().__init__(link, ranks, number, (stage[0], self.paced), targets, *more)

        def serve(self) -> int:
            status = super().serve()
            (folder / f"late{self.link.rank}").write_text(f"{self.paced.late} of {self.paced.done}")
            if took := {rows: statistics.median(each) for rows, each in self.paced.took.items() if len(each) >= PINGS}:
                (folder / "drafting").write_text(json.dumps(took))
            return status

    return Padded


def lead(engine: Any, wishes: list[drafting.Wish], job: dict[str, Any], folder: Path, paced: Paced) -> dict[str, Any]:
    """Plain (no wish) and each strategy in turn, round by round."""
    loop, head = engine.parts.loop, engine.head
    first = Learned(1 / loop.targets)
    probe(loop, first)
    passes = {rows: first.rates(rows) for rows in first.rates._known}
    plain = head.order
    samples: dict[str, list[float]] = {}
    counts: dict[str, dict[str, int]] = {}
    texts = set()
    pids = [int((folder / f"pid{r}").read_text()) for r in range(len(loop.link.hosts))]
    start, cpu = time.monotonic(), sum(map(cpu_of, pids))
    for _ in range(job["rounds"]):
        for number in range(len(wishes) + 1):
            wish = wishes[number] if number < len(wishes) else drafting.Wish()
            name = wish.policy if wish else "plain"
            loop.drafting = bool(wish)
            head.policy = policy_of(wish, first.share, passes)
            head.order = drafting.order_of(wish, plain, loop.targets) if wish else Order(rows=64, sequences=1)
            before = vars(head.counts).copy()
            engine._ids = iter([number])
            asked = engine.submit(job["prompt"], job["tokens"], ignore_eos=True)
            while not asked.finish:
                engine.work()
            f = asked.figures
            samples.setdefault(name, []).append((len(asked.tokens) - 1) / (f.last - f.first))
            counts[name] = {k: v - before[k] for k, v in vars(head.counts).items()}
            texts.add(tuple(asked.tokens))
            engine._jobs.clear()
            time.sleep(0.3)  # what is under way at the drafter ends
    wall = time.monotonic() - start
    cores = (sum(map(cpu_of, pids)) - cpu) / wall
    late = [f"{paced.late} of {paced.done}"]
    return {
        "samples": samples, "counts": counts, "same": len(texts) == 1, "tokens": list(texts.pop()), "cores": cores,
        "seconds": wall, "share": first.share, "passes": passes, "late": late,
    }  # fmt: skip


def cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- both -------------------------------------------------------------------------------------------------


def measure(targets: int, job: dict[str, Any], drafts: Drafts, handled: float) -> dict[str, Any]:
    blocks = even(targets)
    wishes = settings(blocks, job, drafts)
    job["split"] = ",".join(f"{n / BLOCKS:.6f}" for n in blocks) + "/1.0"
    job["strategies"] = [(w.policy, dict(w.knobs)) for w in wishes]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        words = [program, "-n", str(targets + 1), "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
        done = subprocess.run(
            [*words, "--rank", str(path)], env={**os.environ, **root}, stdout=subprocess.PIPE, text=True, check=True
        )
        said = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
        steps = {int(rows): took for rows, took in json.loads((Path(folder) / "drafting").read_text()).items()}
        said["late"] += [f.read_text() for f in sorted(Path(folder).glob("late*"))]
    probed = {int(rows): seconds for rows, seconds in said["passes"].items()}, said["share"]
    rows = {}
    for wish in (drafting.Wish(), *wishes):
        name = wish.policy if wish else "plain"
        measured = statistics.median(said["samples"][name])
        told, counts = predict(wish, blocks, job, said["ways"], drafts, handled, probed, steps)
        rows[name] = {
            "knobs": dict(wish.knobs), "measured": round(measured, 3), "predicted": round(told, 3),
            "error": round(told / measured - 1, 4), "samples": [round(s, 3) for s in said["samples"][name]],
            "guesses": said["counts"][name], "guesses_predicted": counts,
        }  # fmt: skip
    top = max(rows, key=lambda name: float(rows[name]["measured"]))
    return {
        "targets": targets, "blocks": blocks, "strategies": rows, "fastest": top, "ours_fastest": top == "ours",
        "worst_error": max(abs(float(r["error"])) for r in rows.values()), "cores": round(said["cores"], 3),  # type: ignore[arg-type]
        "seconds": round(said["seconds"], 1), "same_text": said["same"] and said["tokens"] == job["answer"],
        "way_ms": [round(1e3 * statistics.median(w), 3) for w in said["ways"]], "handling_ms": round(1e3 * handled, 3),
        "late_steps": said["late"], "draft_steps_ms": {rows: round(1e3 * took, 2) for rows, took in steps.items()},
        "probed_passes": said["passes"], "probed_share": said["share"],
    }  # fmt: skip


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        return rank(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="3,8", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--layer-ms", type=float, default=6.0)
    parser.add_argument("--draft-ms", type=float, default=32.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, draft = smollm2(), noisy()
    prompt, answer, _, agreement = text_of(model, draft, args.tokens)
    job = {
        "model": str(model), "draft": str(draft), "prompt": prompt, "answer": answer, "tokens": args.tokens,
        "rounds": args.rounds, "layer": args.layer_ms / 1e3, "draft_step": args.draft_ms / 1e3,
    }  # fmt: skip
    handled = handling()
    with load(draft, threads=1, context=256) as engine:
        drafts = Drafts(engine, [*prompt, *answer], 5)
        found = [measure(targets, job, drafts, handled) for targets in args.targets]
    result = {"benchmark": "paced", "agreement": agreement, "layer_ms": args.layer_ms, "draft_ms": args.draft_ms}
    tell({**result, "clusters": found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
