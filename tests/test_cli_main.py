"""The frame of the command line: errors in one line, exit codes, Ctrl-C, closed pipes, types of arguments."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace import config, system
from headrace.cli import main as frame
from headrace.cli import parser as p
from headrace.cli.show import Bar, human, table
from headrace.errors import BadFile, Unsupported


def one_line(text: str) -> bool:
    return (text.startswith("headrace: ") and text.count("\n") == 1 and text.endswith(".\n")) or text.endswith(").\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rum"], "there is no command 'rum'; did you mean 'run'?"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["run", "--tmp", "1", "x"], "did you mean --temp?"),
        (["run", "--top", "1", "x"], "unrecognized arguments"),  # no abbreviations
        (["run", "-t", "0", "x"], "-t/--threads: 0 is out of range"),
        (["run", "-n", "-1", "x"], "-n/--tokens: -1 is out of range"),
        (["run", "--chat", "--raw", "x"], "not allowed with"),
        (["inspect"], "required: MODEL"),
        (["cache", "remove"], "required: NAME"),
        (["inspect", "/no/such/file.gguf"], "there is no such file"),
    ],
)
def test_errors_are_one_line_and_exit_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(argv) == frame.EXIT_ERROR
    out, err = capsys.readouterr()
    assert out == "" and said in err and one_line(err)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in frame.COMMANDS)


@pytest.mark.parametrize("command", list(frame.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        frame.main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: headrace {command} [OPTIONS]")
    assert "%(" not in out and "%%" not in out


def raising(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return SimpleNamespace(add=lambda parser: None, run=run)


def test_a_message_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "module", lambda command: raising(BadFile("a\n  b.")))
    assert frame.main(["check"]) == 2
    assert capsys.readouterr().err == "headrace: a b.\n"


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(frame, "module", lambda command: raising(KeyboardInterrupt()))
    assert frame.main(["check"]) == frame.EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "module", lambda command: raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        frame.main(["check"])


def test_a_closed_pipe_is_quiet() -> None:
    code = "from headrace.cli.main import main; import sys; sys.exit(main(['cache']))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("headrace ")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("800M", 800 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), ("1kb", 1024)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert p.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "2X", "G", "1e9", "nan", "1 2", "0.0001"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        p.size(text)


def test_kv_bits() -> None:
    assert [p.kv_bits(text) for text in ("8", "8/4", "16/16")] == [(8, 8), (8, 4), (16, 16)]
    for text in ("", "3", "8/", "/8", "32/16", "8/8/8"):
        with pytest.raises(argparse.ArgumentTypeError):
            p.kv_bits(text)


def test_numbers() -> None:
    assert p.real(0, 1, above=True)("1") == 1.0 and p.counts("1,20") == (1, 20)
    for text in ("0", "1.1", "nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            p.real(0, 1, above=True)(text)
    for text in ("1,,2", "0", "a"):
        with pytest.raises(argparse.ArgumentTypeError):
            p.counts(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.00 kB"), (1e6, "1.00 MB"), (99.96e6, "100 MB"), (1.5e13, "15.0 TB")],
)
def test_human_sizes(nbytes: float, text: str) -> None:
    assert human(nbytes) == text


def test_tables_line_up() -> None:
    assert table([("a", 1), ("bbb", 22)], right=(1,)) == "a     1\nbbb  22"


def test_progress_without_a_terminal_is_a_line_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar() as bar:
        for done in range(1001):
            bar("file", done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 11


def test_configuration() -> None:
    def root(**env: str) -> Path:
        return config.resolve({"HOME": "/home/x", **env}).cache

    assert root(HEADRACE_CACHE="/a", XDG_CACHE_HOME="/b") == Path("/a")
    assert root(XDG_CACHE_HOME="/b") == Path("/b/headrace")
    assert root(XDG_CACHE_HOME="relative").parts[-2:] != ("relative", "headrace")
    assert config.resolve({"HF_ENDPOINT": "http://h/"}).hub == "http://h"
    assert "secret" not in repr(config.resolve({"HF_TOKEN": "secret"}))
    with pytest.raises(Unsupported, match="HF_ENDPOINT"):
        config.resolve({"HF_ENDPOINT": "ftp://h"})


def test_a_memory_cgroup_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/a/b\n0::/\n",
        "/proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    900 kB\n",
        "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500000\n",
        "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "400000\n",
        "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    monkeypatch.setattr(system, "_text", lambda path: files.get(str(path), ""))
    assert system.memory() == system.Memory(1000 << 10, 900 << 10, 500_000, 300_000)
    assert system.memory().usable == 200_000
    files["/proc/self/cgroup"] = "0::/x\n"
    files["/sys/fs/cgroup/x/memory.max"] = "300000\n"
    files["/sys/fs/cgroup/x/memory.current"] = "100000\n"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert system.memory().limit == 300_000 and system.memory().usable == 200_000
    assert system.threads() <= 2
