"""Ranks without MPI: every message is packed, delayed at random and unpacked; the bytes computed stay the same.

A head with the first stage, two ranks with the others and one that drafts, all stepped by one thread: whenever the
head waits, the others work.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest

from headrace.cluster import handshake, message
from headrace.cluster.handshake import Control, Failure, Hello, Look, Ping, Plan, Seen, Stop, difference, threads_each
from headrace.cluster.members import CONTROL, Arrival, Member, MpiHead
from headrace.cluster.message import Limits, Message
from headrace.errors import BadMessage, HeadraceError, Lost
from headrace.kernels.device import PAGE
from headrace.kernels.dispatch import make_device
from headrace.memory.weights import Resident
from headrace.model.layers import Model
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.types import Cancel, Emit, Finish, Passed, Result, Submit, Withdraw
from helpers_tiny import VOCAB, WIDTH
from test_two_orders import PAGES, LaunchAll, Recording, Scripted, computer, model, plain, requests

__all__ = ["model", "plain"]


class Net:
    """Links between ranks. A message takes its time; those of one pair stay in order, but cancels may overtake."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.links = [NetLink(self, rank, ranks) for rank in range(ranks)]
        self.members: list[Member] = []
        self.flying: dict[tuple[int, int], deque[tuple[int, bytes]]] = {}
        self.cancels = 0

    def fly(self, source: int, rank: int, to: int, data: bytes) -> None:
        queue = self.flying.setdefault((source, rank), deque())
        if data[3] == message.CANCEL:
            self.cancels += 1
            queue.insert(self.random.randint(0, len(queue)), (to, data))
        else:
            queue.append((to, data))

    def work(self) -> None:
        """Something arrives somewhere, or some rank does something."""
        full = [pair for pair, queue in self.flying.items() if queue]
        busy = [m for m in self.members if m._queue or m.link.inbox]  # type: ignore[attr-defined]
        if full and (not busy or self.random.random() < 0.5):
            source, rank = self.random.choice(full)
            to, data = self.flying[source, rank].popleft()
            self.links[rank].arrive(source, to, bytearray(data))
        elif busy:
            member = self.random.choice(busy)
            member.take()
            if member._queue:
                member.turn()


class NetLink:
    def __init__(self, net: Net, rank: int, size: int) -> None:
        self.net, self.rank, self.size = net, rank, size
        self.hosts = tuple(f"host{i}" for i in range(size))
        self.origins = tuple(range(size))
        self.gone = ""
        self.limits: dict[int, Limits] = {}
        self.inbox: deque[Arrival] = deque()
        self.sent: Counter[tuple[int, str]] = Counter()

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def send(self, rank: int, to: int, what: Message | Control) -> None:
        data = handshake.pack(what) if to == CONTROL else message.pack(what)  # type: ignore[arg-type]
        self.sent[to, "bytes"] += len(data)
        self.net.fly(self.rank, rank, to, data)

    def arrive(self, source: int, to: int, data: bytearray) -> None:
        found = handshake.unpack(data) if to == CONTROL else message.unpack(data, self.limits[to])
        self.inbox.append(Arrival(source, to, found))

    def receive(self) -> Arrival | None:
        if self.rank == 0 and self.net.random.random() < 0.3:
            self.net.work()  # others don't wait until the head has nothing to do
        if not self.inbox:
            return None
        arrival = self.inbox.popleft()
        if isinstance(arrival.message, HeadraceError):
            raise arrival.message
        return arrival

    def wait(self, seconds: float) -> None:
        self.net.work()

    def reform(self) -> bool:
        return False


def cluster(model: Model, drafter: Scripted | None, seed: int) -> tuple[MpiHead, list[Member], Net]:
    """Three stages on ranks 0 to 2, and the drafter on rank 3."""
    count = len(model.layers)
    parts = []
    for a, b in itertools.pairwise((0, 3, 6, count)):
        own = range(a, b)
        parts.append((Stage(a, b, count), computer(model, own, Resident(make_device("cpu", threads=1), model, own))))
    net = Net(4, seed)
    for i, link in enumerate(net.links[:3]):
        link.limits[i] = Limits(VOCAB, PAGES * PAGE, WIDTH if i else 0)
    net.links[0].limits[MpiHead.HEAD] = Limits(VOCAB)
    net.links[3].limits[MpiHead.DRAFTER] = Limits(VOCAB)
    ranks = {MpiHead.HEAD: 0, 0: 0, 1: 1, 2: 2, MpiHead.DRAFTER: 3}
    head = Head(PAGES, Order(rows=16, runs=2, blocks=6, chunk=16), LaunchAll())
    loop = MpiHead(net.links[0], ranks, head, parts[:1], 3, drafting=drafter is not None)
    members = [Member(net.links[i], ranks, i, parts[i], 3) for i in (1, 2)]
    if drafter is not None:
        members.append(Member(net.links[3], ranks, 3, None, 3, drafter=drafter))
    net.members = members
    return loop, members, net


@pytest.mark.parametrize("seed", range(3))
def test_ranks_compute_the_bytes_of_one_process(model: Model, plain, seed: int) -> None:  # type: ignore[no-untyped-def]
    truth = {r.id: [*r.tokens, *plain[0][r.id]] for r in requests()}
    loop, members, net = cluster(model, Scripted(truth), seed)
    last = members[1].stages[0][1]
    assert isinstance(last, Recording)
    for request in requests():
        loop.submit(Submit(request))
    tokens: dict[int, list[int]] = {r.id: [] for r in requests()}
    while not loop.idle:
        for out in loop.pump():
            if isinstance(out, Emit):
                tokens[out.request].append(out.token)
    assert tokens == plain[0]
    computed = {(seq, position, logits) for (seq, position, _), logits in last.logits.items()}
    assert {(*row, logits) for row, logits in plain[1].items()} <= computed
    assert net.cancels > 10
    for _ in range(2000):
        net.work()
    assert loop.head.check_integrity() == []
    assert [line for m in (loop, *members) for stage, _ in m.stages for line in stage.check_integrity()] == []


def test_a_withdrawn_request_gives_everything_back(model: Model, plain) -> None:  # type: ignore[no-untyped-def]
    loop, _, _ = cluster(model, None, 1)
    for request in requests():
        loop.submit(Submit(request))
    told, withdrawn = 0, False
    finished = {}
    while not loop.idle:
        for out in loop.pump():
            told += isinstance(out, Emit)
            if isinstance(out, Finish):
                finished[out.request] = out.reason
        if told >= 5 and not withdrawn:
            for request in requests():
                loop.submit(Withdraw(request.id))
            withdrawn = True
    assert set(finished.values()) <= {"cancelled", "length"} and "cancelled" in finished.values()
    assert loop.head.check_integrity() == [] and loop.head.pool.available == PAGES


def test_a_failure_is_raised_at_once_and_ever_after(model: Model) -> None:
    loop, _, net = cluster(model, None, 1)
    loop.submit(Submit(requests()[0]))
    net.fly(2, 0, CONTROL, handshake.pack(Failure("On rank 2 on host2: the disk failed.")))
    for _ in range(2):
        with pytest.raises(Lost, match="rank 2 on host2: the disk failed"):
            while not loop.idle:
                loop.pump()


def test_messages_for_the_wrong_address_are_refused(model: Model) -> None:
    loop, members, net = cluster(model, None, 1)
    net.links[1].inbox.append(Arrival(0, 1, Result(0, 1, ())))
    with pytest.raises(BadMessage, match="Result came from rank 0 on host0 for address 1"):
        members[0].take()
    net.links[0].inbox.append(Arrival(2, MpiHead.HEAD, Cancel(0, 1, frozenset())))
    with pytest.raises(BadMessage, match="Cancel came from rank 2"):
        loop.take()
    net.links[1].inbox.append(Arrival(2, CONTROL, Stop(0)))
    with pytest.raises(BadMessage, match="Stop came from rank 2 on host2 out of turn"):
        members[0].take()
    net.links[1].inbox.append(Arrival(0, CONTROL, Stop(7)))
    assert members[0].serve() == 7


# --- the handshake ----------------------------------------------------------------------------------------

HELLO = Hello("0.1", "ab", "", (16, 16), "0.5,0.5", (0, 1))
CONTROLS: list[Control] = [
    HELLO, Plan((0, 2), (2, 5), (1, 2), 64, 80, 512, 2, 1), Stop(2), Failure("the disk é"), Ping(), Look(),
    Seen(9, (1, 500), (2, 80), (1, 0, 3, 4, 1, 0, 2), (), 0),
]  # fmt: skip


@pytest.mark.parametrize("said", CONTROLS, ids=lambda said: type(said).__name__)
def test_control_messages_come_back_and_wrong_ones_are_refused(said: Control) -> None:
    raw = handshake.pack(said)
    assert handshake.unpack(raw) == said
    rnd = random.Random(3)
    for _ in range(300):
        bad = bytearray(raw)
        for _ in range(rnd.randint(1, 3)):
            bad[rnd.randrange(len(bad))] = rnd.randrange(256)
        try:
            handshake.unpack(bad)
        except BadMessage:
            continue
    with pytest.raises(BadMessage):
        handshake.unpack(raw[:-1])


def test_hostile_json_is_refused() -> None:
    def wrapped(body: bytes, kind: int = 19) -> bytes:
        head = bytearray(handshake.pack(Stop(1))[:4])
        head[3] = kind
        return bytes(head) + (8 + len(body)).to_bytes(4, "little") + body

    values = [b"-1", b"true", b"1.0", b'1, "x": 2', b"9" * 50, b"1e5", b"NaN", b"[1]"]
    bodies = [b"[" * 60000, b"{}", b"null", b"\xff", b'{"status": 1}' + b" " * 70000]
    for body in (*bodies, *(b'{"status": ' + value + b"}" for value in values)):
        with pytest.raises(BadMessage):
            handshake.unpack(wrapped(body))
    assert handshake.unpack(wrapped(b'{"status": 1}')) == Stop(1)
    with pytest.raises(BadMessage, match="unknown kind"):
        handshake.unpack(message.pack(Passed(1)))
    assert len(handshake.pack(Failure("é" * 100_000))) < handshake.MOST


def test_a_sentence_says_what_differs() -> None:
    assert difference(HELLO, HELLO, "Rank 1 on host b") is None
    cases = [
        (Hello("0.2", "ab", "", (16, 16), "0.5,0.5", ()), "runs Headrace 0.2 and the head runs 0.1"),
        (Hello("0.1", "cd", "", (16, 16), "0.5,0.5", ()), "has another model file than the head"),
        (Hello("0.1", "ab", "x", (16, 16), "0.5,0.5", ()), "has another draft model"),
        (Hello("0.1", "ab", "", (8, 4), "0.5,0.5", ()), "keeps K and V in 8/4 bits and the head in 16/16"),
        (Hello("0.1", "ab", "", (16, 16), "", ()), "was given the layer split '' and the head '0.5,0.5'"),
    ]
    for other, says in cases:
        said = difference(HELLO, other, "Rank 1 on host b")
        assert said is not None and said.startswith(f"Rank 1 on host b {says}") and said.endswith(".")


def test_threads_are_shared_by_the_ranks_of_a_host() -> None:
    def hello(*cpus: int) -> Hello:
        return Hello("", "", "", (), "", cpus)

    assert threads_each([hello(0, 1, 2, 3)] * 2, ["a", "a"], [0]) == (2, 2)
    assert threads_each([hello(0, 1, 2, 3)] * 2, ["a", "b"], [0]) == (4, 4)
    assert threads_each([hello(0, 1), hello(2, 3)], ["a", "a"], [0]) == (2, 2)
    assert threads_each([hello(0)] * 3, ["a"] * 3, [0]) == (1, 1, 1)
    assert threads_each([hello(0, 1)] * 2, ["a", "a"], [6]) == (6, 6)
    assert threads_each([hello(0, 1)] * 2, ["a", "b"], [6, 0]) == (6, 2)


def test_a_lost_rank_is_replaced_and_nothing_told_twice(model: Model, plain) -> None:  # type: ignore[no-untyped-def]
    """What was under way is computed again by another cluster, from its tokens on; the rest waits its turn."""
    loop, _, net = cluster(model, None, 1)
    loop.head.order = Order(rows=16, sequences=2)
    again = 0

    def recover(error: Lost) -> bool:
        nonlocal again
        again += 1
        other, members, _ = cluster(model, None, 2)
        net.members[:] = members
        net.links[:] = [other.link, *(m.link for m in members)]  # type: ignore[list-item]
        loop.link = other.link
        loop.restart(other.ranks, Head(PAGES, Order(rows=16, sequences=2), epoch=0), other.stages, 3)
        return True

    loop.recover = recover
    for request in requests():
        loop.submit(Submit(request))
    tokens: dict[int, list[int]] = {r.id: [] for r in requests()}
    while not loop.idle:
        for out in loop.pump():
            if isinstance(out, Emit):
                tokens[out.request].append(out.token)
        if again < 2 and sum(map(len, tokens.values())) >= 9 * (again + 1):
            net.links[0].inbox.append(Arrival(-1, CONTROL, Lost("Lost: rank 1.")))
    assert again == 2 and tokens == plain[0]
    assert loop.head.check_integrity() == [] and loop.head.pool.available == PAGES
