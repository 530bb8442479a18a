"""The head: owns tokens, slots and every decision. A state machine without I/O.

``on_event(event, now) -> effects``. A driver (one process, MPI, virtual time) carries the effects.
Per sequence there are two counters, launched and known, not two phases; guesses are rows like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from headrace.memory.slots import SlotPool, pages_for
from headrace.run.live import Counts, Flight, Live
from headrace.run.policy import GuessPolicy
from headrace.run.schedule import Demand, Order, Share, fill
from headrace.run.tree import Node, graft
from headrace.run.types import (
    Append,
    CacheOp,
    Cancel,
    Choice,
    Committed,
    Draft,
    Emit,
    Finish,
    Forget,
    Fork,
    Free,
    HeadEffect,
    HeadEvent,
    Params,
    Passed,
    Request,
    Result,
    Row,
    RunMessage,
    Submit,
    Withdraw,
)


class Head:
    """Decides what runs; see the module's docstring.

    pages: pages of cache on every stage. order: the plan's order. policy: which guesses to launch.
    """

    def __init__(self, pages: int, order: Order, policy: GuessPolicy | None = None, epoch: int = 0) -> None:
        self.order = order
        self.epoch = epoch
        self.pool = SlotPool(pages)
        self.policy = policy or GuessPolicy()
        self.live: dict[int, Live] = {}
        self.kept: dict[int, Live] = {}
        self.flights: dict[int, Flight] = {}
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self._ops: list[CacheOp] = []
        self._next_run = 0
        self._blocks = 0
        self._entering: set[int] = set()
        """Runs that have not left stage 0 yet."""
        self._turn: deque[int] = deque()
        """Sequence ids, the least recently served first."""

    # --- events -----------------------------------------------------------------------------------------

    def on_event(self, event: HeadEvent, now: float) -> list[HeadEffect]:
        """One thing happened; returns what must be carried out, in order."""
        return self.on_events((event,), now)

    def on_events(self, events: Sequence[HeadEvent], now: float) -> list[HeadEffect]:
        """Things happened together (requests of a batch): all are heard before a block is composed of them."""
        effects: list[HeadEffect] = []
        for event in events:
            self._hear(event, now, effects)
        self._admit(effects)
        self._launch(now, effects)
        return effects

    def _hear(self, event: HeadEvent, now: float, effects: list[HeadEffect]) -> None:
        if isinstance(event, Result):
            self._result(event, now, effects)
        elif isinstance(event, Draft):
            live = self.live.get(event.seq)
            if live is not None:
                self.policy.drafted(live.seq, event, graft(live.tip, live.tokens, event), now)
        elif isinstance(event, Passed):
            self._entering.discard(event.run)
        elif isinstance(event, Submit):
            self.waiting.append(event.request)
        elif isinstance(event, Withdraw):
            self._withdraw(event, effects)
        else:
            self._forget(event)

    @property
    def idle(self) -> bool:
        return not (self.live or self.waiting or self.flights)

    def fits(self, request: Request) -> bool:
        """Whether the request could ever be admitted."""
        return pages_for(self._slots_needed(request)) <= self.pool.total

    # --- admission --------------------------------------------------------------------------------------

    def _slots_needed(self, request: Request) -> int:
        return len(request.tokens) + request.max_tokens + self.policy.most_guesses

    def _admit(self, effects: list[HeadEffect]) -> None:
        while self.waiting and len(self.live) < self.order.sequences:
            request = self.waiting[0]
            live = self._start(request)
            if live is not None:
                self.waiting.popleft()
                self.live[live.seq] = live
                self._turn.append(live.seq)
                self._ops.append(Params(live.seq, request.sampling))
                effects.append(Committed(live.seq, 0, tuple(live.tokens), sampling=request.sampling))
            elif self.kept and not self.live:
                self._forget(Forget(next(iter(self.kept))))
            elif self.live or self.flights:
                return
            else:
                self.waiting.popleft()
                effects.append(Finish(request.id, "too long"))

    def _start(self, request: Request) -> Live | None:
        """Lease slots for a request, sharing a kept sequence's common prefix; None when there is no room."""
        old = self.kept.get(request.continues) if request.continues is not None else None
        if old is not None:
            pairs = zip(old.tokens[: old.launched], request.tokens[:-1], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shared = old.slots[:same]
            lease = self.pool.fork(shared, self._slots_needed(request) - same)
            if lease is not None:
                self._ops.append(Fork(request.id, old.seq, same))
                live = Live(request, lease, list(request.tokens), launched=same, slots=list(shared))
                self._forget(Forget(old.seq))
                return live
        fresh = self.pool.lease(self._slots_needed(request))
        return None if fresh is None else Live(request, fresh, list(request.tokens))

    def _forget(self, event: Forget) -> None:
        old = self.kept.pop(event.request, None)
        if old is not None:
            self.pool.release(old.lease)
            self._ops.append(Free(old.seq))

    # --- results ----------------------------------------------------------------------------------------

    def _result(self, result: Result, now: float, effects: list[HeadEffect]) -> None:
        if result.epoch != self.epoch:
            return
        flight = self.flights.pop(result.run)
        self._blocks -= flight.last
        self._entering.discard(result.run)
        self.policy.returned(result.run, len(flight.rows) - len(flight.gone), now)
        touched: dict[int, None] = {}
        for choice in result.choices:
            seq, node = flight.rows[choice.row]
            if node is not None and choice.row not in flight.gone and seq in self.live:
                node.answer = choice
                touched[seq] = None
        cancels: dict[int, set[int]] = {}
        for seq in touched:
            self._advance(self.live[seq], now, cancels, effects)
        self._send_cancels(cancels, effects)

    def _advance(self, live: Live, now: float, cancels: dict[int, set[int]], effects: list[HeadEffect]) -> None:
        """Commit as far as answers reach; drop what they prove wrong, keep the subtree under what they choose."""
        start = len(live.tokens)
        reason = ""
        while (choice := live.tip.answer) is not None:
            reason = self._commit(live, choice, effects)
            if reason:
                break
            chosen = live.tip.children.pop(choice.token, None)
            for node in live.tip.children.values():
                self._drop(live, node, cancels)
            self.policy.judged(live.seq, live.tip, chosen, now)
            if chosen is None:
                live.tip = Node(choice.token, len(live.tokens) - 1)
                continue
            chosen.parent = None
            live.tip = chosen
            if chosen.launched:
                assert chosen.slot is not None
                self.counts.accepted += 1
                live.launched += 1
                live.slots.append(chosen.slot)
                self._ops.append(Append(live.seq, (chosen.slot,), (chosen.token,)))
        if len(live.tokens) > start or reason:
            effects.append(Committed(live.seq, start, tuple(live.tokens[start:]), over=bool(reason)))
        if reason:
            self._finish(live, reason, cancels, effects)

    def _commit(self, live: Live, choice: Choice, effects: list[HeadEffect]) -> str:
        """Take a sampled token; returns why the sequence ends here, or ""."""
        if choice.token < 0:
            return "error"
        effects.append(Emit(live.seq, choice.token, len(live.tokens), choice.logprob, choice.top))
        if choice.token in live.request.ends:
            return "end"
        live.tokens.append(choice.token)
        live.emitted += 1
        return "length" if live.emitted >= live.request.max_tokens else ""

    def _drop(self, live: Live, top: Node, cancels: dict[int, set[int]]) -> None:
        """Throw a subtree away: its slots can be handed out at once, its rows under way are cancelled."""
        for node in top.subtree():
            node.dead = True
            if node.slot is None:
                continue
            self.pool.give_back(live.lease, node.slot)
            flight = self.flights.get(node.run)
            if flight is not None:
                self._lose(node.run, flight, node.row, cancels)

    def _lose(self, run: int, flight: Flight, row: int, cancels: dict[int, set[int]]) -> None:
        """Cancel a row under way. A run without rows no longer holds a place: what is known must not wait for it."""
        flight.gone.add(row)
        self.counts.cancelled += 1
        cancels.setdefault(run, set()).add(row)
        if flight.last and len(flight.gone) == len(flight.rows):
            flight.last = False
            self._blocks -= 1

    def _finish(self, live: Live, reason: str, cancels: dict[int, set[int]], effects: list[HeadEffect]) -> None:
        for node in live.tip.children.values():
            self._drop(live, node, cancels)
        live.tip.children = {}
        for run, flight in self.flights.items():
            for row, (seq, _) in enumerate(flight.rows):
                if seq == live.seq and row not in flight.gone and not live.request.keep:
                    self._lose(run, flight, row, cancels)
        del self.live[live.seq]
        self._turn.remove(live.seq)
        self.policy.over(live.seq)
        if live.request.keep:
            self.kept[live.seq] = live
        else:
            self.pool.release(live.lease)
            self._ops.append(Free(live.seq))
        effects.append(Finish(live.seq, reason))

    def _withdraw(self, event: Withdraw, effects: list[HeadEffect]) -> None:
        for request in self.waiting:
            if request.id == event.request:
                self.waiting.remove(request)
                effects.append(Finish(event.request, event.reason))
                return
        live = self.live.get(event.request)
        if live is not None:
            cancels: dict[int, set[int]] = {}
            effects.append(Committed(live.seq, len(live.tokens), (), over=True))
            self._finish(live, event.reason, cancels, effects)
            self._send_cancels(cancels, effects)

    def _send_cancels(self, cancels: dict[int, set[int]], effects: list[HeadEffect]) -> None:
        effects.extend(Cancel(self.epoch, run, frozenset(rows)) for run, rows in sorted(cancels.items()))

    # --- launching --------------------------------------------------------------------------------------

    def _launch(self, now: float, effects: list[HeadEffect]) -> None:
        while self._blocks < self.order.blocks:
            block = self._compose(now)
            if not block:
                break
            self._blocks += 1
            for i, rows in enumerate(block):
                self._send(rows, i + 1 < len(block), now, effects)
        if not self.flights and any(isinstance(op, Free) for op in self._ops):
            self._blocks += 1
            self._send([], False, now, effects)

    def _compose(self, now: float) -> list[list[tuple[Row, Node | None]]]:
        """The rows of the next block's runs: known tokens by ``schedule.fill``, then guesses where there is room."""
        demands = []
        share = -(-len(self.live) // self.order.blocks) if self.order.even else len(self.live)
        for seq in self._turn:
            live = self.live[seq]
            known, prompt = len(live.tokens) - live.launched, live.emitted == 0
            if known and (prompt or share) and self.policy.ready(seq, live.tip, now):
                demands.append(Demand(seq, known, prompt))
                share -= not prompt
        runs = [self._known_rows(shares, self._next_run + i) for i, shares in enumerate(fill(demands, self.order))]
        tips = [(seq, self.live[seq].tip) for seq in self._turn if self.live[seq].tip.launched]
        for at, nodes in self.policy.place(tips, [len(r) for r in runs], not self._entering, self.order, now):
            for seq, node in nodes:
                slot = self._guess_slot(self.live[seq], node)
                if slot is None:
                    continue
                assert node.parent is not None
                at = min(max(at, node.parent.run - self._next_run), len(runs))
                if at == len(runs):
                    runs.append([])
                node.slot = slot
                self.counts.launched += 1
                node.run = self._next_run + at
                runs[at].append((node.as_guess(seq), node))
        return runs

    def _guess_slot(self, live: Live, node: Node) -> int | None:
        """A slot for a guess, if its parent has a row and the sequence's own tokens keep enough."""
        end = len(live.request.tokens) + live.request.max_tokens
        if node.parent is None or not node.parent.launched or node.launched or node.position >= end:
            return None
        return self.pool.take(live.lease) if self.pool.room(live.lease) > end - live.launched else None

    def _known_rows(self, shares: Sequence[Share], run: int) -> list[tuple[Row, Node | None]]:
        rows: list[tuple[Row, Node | None]] = []
        for share in shares:
            live = self.live[share.seq]
            self._turn.remove(share.seq)
            self._turn.append(share.seq)
            start, end = live.launched, live.launched + share.known
            slots = [self.pool.take(live.lease) for _ in range(share.known)]
            placed = tuple(s for s in slots if s is not None)
            assert len(placed) == share.known, "a lease is used up before its sequence is over"
            self._ops.append(Append(live.seq, placed, tuple(live.tokens[start:end])))
            live.slots.extend(placed)
            live.launched = end
            last = end == len(live.tokens)
            for i, slot in enumerate(placed):
                tip = live.tip if last and i == share.known - 1 else None
                rows.append((Row(live.seq, start + i, live.tokens[start + i], slot, wanted=tip is not None), tip))
            if last:
                live.tip.run = run
        return rows

    def _send(self, rows: list[tuple[Row, Node | None]], more: bool, now: float, effects: list[HeadEffect]) -> None:
        run = self._next_run
        self._next_run += 1
        self.counts.runs += 1
        for i, (_, node) in enumerate(rows):
            if node is not None:
                node.run, node.row = run, i
        self._entering.add(run)
        self.flights[run] = Flight([(row.seq, node) for row, node in rows], last=not more)
        self.policy.launched(run, rows, now)
        effects.append(RunMessage(self.epoch, run, more, tuple(self._ops), tuple(row for row, _ in rows)))
        self._ops = []

    # --- checks -----------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, as sentences; empty when all is well. For tests and the simulator; costs O(everything)."""
        lives = [*self.live.values(), *self.kept.values()]
        wrong = self.pool.check_integrity([live.lease for live in lives])
        for live in lives:
            used = [*live.slots, *(n.slot for n in live.tip.subtree() if n.slot is not None and n.parent)]
            if len(set(used)) != len(used):
                wrong.append(f"sequence {live.seq}: a slot is used twice")
            if set(used) & set(live.lease.free):
                wrong.append(f"sequence {live.seq}: a slot is both used and free")
            if live.launched != len(live.slots) or live.launched > len(live.tokens):
                wrong.append(f"sequence {live.seq}: {live.launched} launched, {len(live.slots)} slots")
        if self.idle and (self._blocks or self._turn):
            wrong.append("idle, yet blocks or turns are left")
        return wrong
