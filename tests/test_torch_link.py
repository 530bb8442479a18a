"""The link: counted, paced, urgent copies first, errors told to those who asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.torch_copy import HostMover  # noqa: E402
from headrace.memory.link import PIECE, Link, Pace  # noqa: E402


class Gate(HostMover):
    """Notes what is copied, and can be held up before a copy."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def copy(self, dst: Any, src: Any) -> None:
        self.reached.set()
        assert self.open.wait(30)
        if len(src) == 13:
            raise OSError("thirteen")
        self.sizes.append(len(src))
        super().copy(dst, src)


def pair(nbytes: int) -> tuple[Any, Any]:
    return torch.zeros(nbytes, dtype=torch.uint8), torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_bytes_arrive_and_are_counted_by_direction_and_purpose() -> None:
    link = Link({"to_device": HostMover(), "to_host": HostMover()})
    pairs = [pair(PIECE * 2 + 5), pair(7)]
    table = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    copy = torch.zeros(2, 3)
    done = [link.send("to_device", "weights", pairs), link.send("to_host", "qkv", [(copy, table)], urgent=True)]
    done.append(link.send("to_device", "weights", [pair(1)]))
    for each in done:
        each.result(30)
    assert all(torch.equal(to, of) for to, of in pairs) and torch.equal(copy, table)
    assert dict(link.sent) == {("to_device", "weights"): 2 * PIECE + 13, ("to_host", "qkv"): 24}
    with pytest.raises(ValueError, match="contiguous"):
        link.send("to_host", "x", [(copy, table.t())])
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.send("to_device", "weights", pairs)


def test_urgent_copies_overtake_between_pieces() -> None:
    gate = Gate()
    link = Link({"to_device": gate, "to_host": HostMover()})
    gate.open.clear()
    big = link.send("to_device", "weights", [pair(3 * PIECE)])
    assert gate.reached.wait(30)
    small = link.send("to_device", "x", [pair(64)], urgent=True)
    later = link.send("to_device", "weights", [pair(100)])
    gate.open.set()
    for each in (big, small, later):
        each.result(30)
    assert gate.sizes == [PIECE, 64, PIECE, PIECE, 100]
    link.close()


def test_the_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("headrace.memory.link.time", time)
    link = Link({"to_device": HostMover(), "to_host": HostMover()}, Pace(1e6, 0.25))
    link.send("to_device", "weights", [pair(3_000_000)]).result(30)
    assert time.now == pytest.approx(103.25)
    link.send("to_device", "weights", [pair(500_000)]).result(30)
    assert time.now == pytest.approx(104.0)
    time.now += 50  # an idle link saves nothing up
    link.send("to_device", "weights", [pair(500_000)]).result(30)
    assert time.now == pytest.approx(154.75)
    link.close()


def test_a_copy_that_fails_tells_who_asked_and_the_link_goes_on() -> None:
    link = Link({"to_device": Gate(), "to_host": HostMover()})
    with pytest.raises(OSError, match="thirteen"):
        link.send("to_device", "weights", [pair(13)]).result(30)
    link.send("to_device", "weights", [pair(14)]).result(30)
    link.close()


def test_closing_finishes_what_is_queued() -> None:
    gate = Gate()
    link = Link({"to_device": gate, "to_host": HostMover()})
    gate.open.clear()
    pairs = [pair(2 * PIECE), pair(9)]
    sent = [link.send("to_device", "weights", [p]) for p in pairs]
    gate.open.set()
    link.close()
    assert all(s.done() for s in sent) and all(torch.equal(to, of) for to, of in pairs)
