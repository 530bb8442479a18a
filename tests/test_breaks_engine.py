"""What a clumsy caller does to the Python interface: refused by name, and never a hang."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.engine import Engine
from headrace.errors import BadRequest, HeadraceError, Unavailable
from headrace.run.types import Sampling
from helpers_tiny import tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", text=True)


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with headrace.load(path, threads=1, context=256) as engine:
        yield engine


def test_one_bad_prompt_leaves_nothing_queued(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="tokens and the context is 256"):
        engine.generate(["good", "x" * 300, "good"])
    assert engine.parts.loop.idle and engine.head.idle
    assert engine.generate([]) == []
    assert engine.generate(["good"], max_tokens=3)[0].finish == "length"


@pytest.mark.parametrize("prompts", ["text", [None], [5], [[1.5]], [["5"]], [[10**30]], [[-1]], [[]]])
def test_prompts_that_are_none(engine: Engine, prompts: Any) -> None:
    with pytest.raises(BadRequest):
        engine.generate(prompts)


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 2.5}, {"max_tokens": "3"}, {"max_tokens": 0}, {"stop": "text"}, {"stop": [""]}, {"stop": [b"x"]}],
)
def test_requests_that_make_no_sense(engine: Engine, change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        engine.generate(["good"], **change)


@pytest.mark.parametrize(
    "change",
    [{"top_k": 2**31}, {"top_k": 1.5}, {"temperature": "x"}, {"temperature": float("nan")}, {"seed": "a"},
     {"seed": 2**64}, {"choice": None}, {"repeat_penalty": float("inf")}, {"logprobs": 0.5}],
)  # fmt: skip
def test_sampling_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(change))):
        Sampling(**change)


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"sequences": 0}, {"runs": 0}, {"caches": -1}, {"threads": 1.5}, {"threads": -1}, {"context": "x"},
     {"ram": "2G"}, {"ram": -1}, {"kv_bits": (3, 3)}, {"kv_bits": 8}, {"kv_bits": "8/4"}],
)  # fmt: skip
def test_options_that_make_no_sense(path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(change))):
        headrace.load(path, **{"threads": 1, **change})


def test_closed(path: Path) -> None:
    engine = headrace.load(path, threads=1)
    stream = engine.stream("hello", max_tokens=9)
    next(stream)
    engine.close()
    engine.close()
    for use in (lambda: engine.generate(["hello"]), lambda: next(engine.stream("hello"))):
        with pytest.raises(BadRequest, match="closed"):
            use()


def test_after_a_failure_within_it_is_refused_and_does_not_hang(engine: Engine, monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more\nof it")

    stream = engine.stream("hello", max_tokens=9)
    next(stream)
    monkeypatch.setattr(engine.parts.computer, "step", fail)
    with pytest.raises(MemoryError):
        list(stream)
    monkeypatch.undo()
    with pytest.raises(Unavailable, match=r"MemoryError no more\); load the model again"):
        engine.generate(["hello"])


def test_ctrl_c_is_raised_and_the_engine_goes_on(engine: Engine, monkeypatch: Any) -> None:
    before = engine.generate(["hello"], max_tokens=9)[0].text
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    step, steps = engine.parts.computer.step, 0

    def press(layer: int, run: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 8:
            signal.raise_signal(signal.SIGINT)
        step(layer, run)

    monkeypatch.setattr(engine.parts.computer, "step", press)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["hello"], max_tokens=200)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, old)
    assert steps < 20 and not engine.head.live
    assert engine.generate(["hello"], max_tokens=9)[0].text == before


def test_another_thread_is_refused(engine: Engine, monkeypatch: Any) -> None:
    said: list[str] = []
    step = engine.parts.computer.step

    def other() -> None:
        try:
            engine.generate(["there"], max_tokens=3)
        except HeadraceError as error:
            said.append(str(error))

    def meanwhile(layer: int, run: Any) -> None:
        if not said:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        step(layer, run)

    before = engine.generate(["hello"], max_tokens=5)[0].text
    monkeypatch.setattr(engine.parts.computer, "step", meanwhile)
    assert engine.generate(["hello"], max_tokens=5)[0].text == before
    assert said == ["The engine is computing for another thread; use it from one at a time."]
    assert engine.generate(["hello"], max_tokens=5)[0].text == before and not engine.head.live


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork_the_child_is_refused(engine: Engine) -> None:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang is a failure, not a hang of the tests
        try:
            engine.generate(["hello"], max_tokens=2)
            status = 1
        except BadRequest as error:
            status = 0 if "fork" in str(error) else 2
        engine.close()
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert engine.generate(["hello"], max_tokens=2)[0].finish


def test_huge_top_k_on_the_command_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", str(path), "--temp", "1", "--top-k", "99999999999999999999", "hello"]) == 2
    assert "--top-k" in capsys.readouterr().err
