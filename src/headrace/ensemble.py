"""One model over several ranks: what rank 0 does to lead them, and what every other rank does.

Say hello, hear the plan, load the layers that are one's own, say ready, work until the head says stop.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from headrace import __version__, drafting, shipping
from headrace.cluster import handshake
from headrace.cluster.handshake import Begin, Failure, Hello, Part, Plan, Ready, Stop, difference, threads_each
from headrace.cluster.members import CONTROL, Link, Member, MpiHead
from headrace.cluster.message import Limits
from headrace.cluster.ship import WINDOW
from headrace.cluster.split import check, over_ranks, parse
from headrace.errors import BadMessage, BadRequest, Failed, HeadraceError, Lost
from headrace.kernels.device import PAGE
from headrace.kernels.dispatch import make_device
from headrace.memory.budget import Budget
from headrace.memory.slots import pages_for
from headrace.memory.weights import Weights
from headrace.model.layers import Layer, Model, load_model
from headrace.options import Options, batch_threads
from headrace.placement import affordable_caches, context_of, load_weights, make_cache, open_file, pass_bytes, place
from headrace.run.compute import DeviceComputer
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.trace import Recorder
from headrace.setup import Parts
from headrace.sharing import heard, rank_of, said, share
from headrace.speculate.drafters import Drafter
from headrace.speculate.learned import Learned, probe
from headrace.text.tokenizer import Tokenizer

GREETING = 300.0
"""Seconds a rank may take to open the model file, which may lie on slow shared storage."""
PARTING = 20.0
"""Seconds a rank that failed waits to be sent home."""

Said = TypeVar("Said", Begin, Hello, Plan, Ready, handshake.Manifest, Part)


class Dismissed(Exception):
    """The head sends this rank home before there was anything to do."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Mine:
    """This rank's stage and what it holds."""

    stage: Stage
    computer: DeviceComputer
    weights: Weights
    budget: Budget
    layers: list[Layer]

    def close(self) -> None:
        self.computer.close()
        self.weights.close()


class Team:
    """What rank 0 knows of the ranks, and how it brings them together, again when one is lost."""

    def __init__(self, link: Link, model: Model, tokenizer: Tokenizer, options: Options) -> None:
        self.link, self.model, self.options = link, model, options
        self.context = context_of(model, options.context)
        self.epoch = 0
        self.wish = drafting.wish_of(options)
        self.draft = drafting.draft_of(self.wish, model, tokenizer, options, self.context)
        self.giver = shipping.giver_of(link, model, self.draft, options)
        self.parts: Parts | None = None
        try:
            self.plan, self.mine = self.gather()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what isn't in ``mine``, where there will be no ``parts`` to do it."""
        if self.giver is not None:
            self.giver.close()
        if self.draft is not None:
            self.draft.close()

    def gather(self) -> tuple[Plan, Mine]:
        """Plan, load and hear that all are ready. Starts anew with those who are left as long as that helps."""
        while True:
            try:
                return self._gather()
            except Lost:
                if not self.link.reform():
                    raise
                self.epoch += 1
                self._tell()

    def _gather(self) -> tuple[Plan, Mine]:
        link = self.link
        for rank in range(1, link.size):
            link.send(rank, CONTROL, Begin())
        plan, self.order = _agree(link, self.model, self.options, self.context, self.epoch, self.draft)
        mine = _load(self.model, self.options, plan, 0, None)
        link.limits[MpiHead.HEAD] = Limits(vocab=self.model.spec.vocab)
        link.limits[0] = _limits(self.model, plan, 0)
        try:
            _gather(link, Ready, range(1, link.size))
        except BaseException:
            mine.close()
            raise
        return plan, mine

    def head(self) -> Head:
        plan = self.plan
        sizes = [sum(self.model.layers[i].nbytes for i in _own(plan, rank)) for rank in range(plan.targets)]
        wish = self.wish if self.drafting else drafting.Wish()
        policy = drafting.rank_policy(wish, max(sizes) / sum(sizes))
        return Head(plan.pages, drafting.order_of(wish, self.order, plan.targets), policy, plan.epoch)

    @property
    def drafting(self) -> bool:
        """Whether anybody drafts: a drafter with layers needs a rank of its own."""
        return self.wish.ngram if self.plan.targets == len(self.plan.firsts) else bool(self.wish)

    def drafter(self) -> Drafter | None:
        """The drafter that is here: one without layers, where no rank drafts."""
        here = self.plan.targets == len(self.plan.firsts) and self.wish.ngram
        return drafting.drafter_of(drafting.Wish(ngram=True, knobs=self.wish.knobs), None) if here else None

    def stages(self) -> list[tuple[Stage, DeviceComputer]]:
        return [(self.mine.stage, self.mine.computer)]

    def recover(self, error: Lost) -> bool:
        """A rank is lost: go on with the others, if that can be."""
        parts = self.parts
        if parts is None or not isinstance(parts.loop, MpiHead) or not self.link.reform():
            return False
        self._tell()
        self.mine.close()
        self.epoch += 1
        self.plan, self.mine = self.gather()
        parts.computer, parts.weights, parts.device = self.mine.computer, self.mine.weights, self.mine.computer.device
        parts.loop.drafter, parts.loop.drafting = self.drafter(), self.drafting
        parts.loop.restart(_ranks(self.plan), self.head(), self.stages(), self.plan.targets)
        return True

    def _tell(self) -> None:
        if self.options.tell is not None:
            left = "rank 0 alone" if self.link.size == 1 else f"{self.link.size} ranks"
            self.options.tell(f"Lost: {self.link.gone}. Going on with {left}.")


def lead(path: Path, options: Options, link: Link) -> Parts:
    """Rank 0: bring all ranks together and load. Raises a HeadraceError that names the rank and what is wrong."""
    with ExitStack() as held:  # closed if anything goes wrong
        file = open_file(path, options)
        held.callback(file.close)
        model = load_model(file)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        tokenizer.check_model(model.spec.vocab)
        team = Team(link, model, tokenizer, options)
        held.callback(team.close)
        held.callback(team.mine.close)
        team.parts = _parts(team, tokenizer)
        held.pop_all()
        return team.parts


def _parts(team: Team, tokenizer: Tokenizer) -> Parts:
    """Rank 0's loop, with everything around it."""
    plan, mine = team.plan, team.mine
    ranks, stages = _ranks(plan), team.stages()
    loop = MpiHead(team.link, ranks, team.head(), stages, plan.targets, team.drafter(), team.drafting, team.recover)
    if isinstance(loop.head.policy, Learned):
        probe(loop, loop.head.policy)
    device = mine.computer.device
    return Parts(
        team.model, tokenizer, device, loop, mine.weights, mine.computer, team.context, mine.budget,
        pass_bytes(device, team.model), team.options.kv_bits, team.draft,
    )  # fmt: skip


def serve(find: Callable[[], Path], options: Options, link: Link, trace: bool = False) -> int:
    """Any other rank, from hello to goodbye; returns the exit status the head gives. Its own failures go to the head.

    find: the model's path, asked for once the head has it. trace: keep all that is seen, for the head to ask for.
    Raises Lost when there is no head to tell.
    """
    try:
        while True:
            try:
                _gather(link, Begin, [0])
                return _serve(find(), options, link, trace)
            except Lost:
                if not link.reform():
                    raise
    except Lost:
        raise
    except Dismissed as sent:
        return sent.status
    except HeadraceError as error:
        text = str(error)
    except Exception as error:
        traceback.print_exc()
        text = f"{error!r}, a mistake in the program; its own output has more."
    link.send(0, CONTROL, Failure(f"On {link.name(link.rank)}: {text}"))
    end = time.monotonic() + PARTING
    while time.monotonic() < end:
        arrival = link.receive()
        if arrival is None:
            link.wait(1.0)
        elif isinstance(arrival.message, Stop):
            return arrival.message.status
    return 2


def _serve(path: Path, options: Options, link: Link, trace: bool) -> int:
    wish = drafting.wish_of(options)
    with ExitStack() as stack:
        named = [path, *filter(None, [wish.model])]
        shipped = shipping.begin(stack, named, options, link, lambda kind, rank: _gather(link, kind, [rank])[rank])
        wish = replace(wish, model=shipped[1].path) if 1 in shipped else wish
        file = stack.enter_context(open_file(shipped[0].path if 0 in shipped else path, options))
        model = load_model(file)
        context = context_of(model, options.context)
        draft = drafting.draft_of(wish, model, Tokenizer.from_metadata(file.metadata), options, context)
        if draft is not None:
            stack.callback(draft.close)
        giver = None if shipped else shipping.giver_of(link, model, draft, options)
        if giver is not None:
            stack.callback(giver.close)
        link.send(0, CONTROL, _hello(link, model, options, draft, sum(1 << which for which in shipped)))
        plan = _gather(link, Plan, [0])[0]
        shipping.finish(shipped, model, draft, plan, link.rank)
        mine = _load(model, options, plan, link.rank, draft)
        try:
            number, first = link.rank, plan.targets
            drafter = drafting.drafter_of(wish, draft) if number == first else None
            link.limits[number] = _limits(model, plan, number)
            if draft is not None and number >= first:
                width = draft.model.spec.width if number > first else 0
                link.limits[number] = Limits(draft.vocab, plan.draft_pages * PAGE, width)
                link.limits[Member.DRAFTER] = Limits(draft.vocab)
            drafts = len(plan.firsts) - first
            member = Member(link, _ranks(plan), number, (mine.stage, mine.computer), first, drafts, drafter)
            member.watch(Recorder(trace, time.monotonic))
            link.send(0, CONTROL, Ready(sum(layer.nbytes for layer in mine.layers)))
            return member.serve()
        finally:
            mine.close()


# --- coming together --------------------------------------------------------------------------------------


def _hello(link: Link, model: Model, options: Options, draft: drafting.Draft | None, lacks: int = 0) -> Hello:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    split = options.layer_split or ""
    drafts = "" if draft is None else f"{len(draft.numbers)} layers of {draft.model.file.digest()}"
    about = "", 0, 0
    if options.choice is not None and not drafting.wish_of(options):
        mine = link.hosts.count(link.hosts[link.rank])
        asked = options.rank_threads[link.origins[link.rank] :][:1] or options.rank_threads[:1] or (options.threads,)
        device = make_device(options.device, threads=asked[0] or max(1, len(cpus) // mine), cpu=options.cpu)
        about = said(rank_of(device, model, options, mine))
    return Hello(__version__, model.file.digest(), drafts, options.kv_bits, split, tuple(cpus), lacks, *about)


def _agree(
    link: Link, model: Model, options: Options, context: int, epoch: int, draft: drafting.Draft | None
) -> tuple[Plan, Order]:
    """Hear everybody's hello, settle plan and order, and tell the plan. Raises BadMessage for a rank that differs."""
    # Shares and thread counts by hand are for the ranks that were started; a rank is known by its number then.
    edges, targets = over_ranks(
        model.layers, draft.layers if draft else None, options.layer_split if epoch == 0 else None, link.size
    )
    others = _gather(link, Hello, range(1, link.size), GREETING)
    hellos = [_hello(link, model, options, draft), *(others[rank] for rank in range(1, link.size))]
    for rank, hello in enumerate(hellos):
        wrong = difference(hellos[0], hello, f"Rank {link.name(rank).removeprefix('rank ')}")
        if wrong:
            raise BadMessage(wrong)
    asked = options.rank_threads or (options.threads,)
    if len(asked) > 1 and epoch:
        asked = tuple(asked[i] for i in link.origins)
    if len(asked) not in (1, link.size):
        raise BadRequest(
            f"{len(asked)} thread counts are given for {link.size} ranks; give one for all, or one for each (-t)."
        )
    threads = threads_each(hellos, link.hosts, asked)
    device = make_device(options.device, threads=threads[0], cpu=options.cpu)
    caches = options.caches or affordable_caches(device, model, context, options)
    pages = pages_for(context + drafting.rank_policy(drafting.wish_of(options), 1.0).most_guesses) * caches
    order = Order(options.rows, options.runs, 1, chunk=options.rows, sequences=options.sequences)
    together: tuple[int, ...] = ()
    if not drafting.wish_of(options):
        order = replace(order, blocks=targets, even=True)
        ranks = [heard(h.machine, h.memory, h.limited) for h in hellos]
        by_hand = edges if options.layer_split is not None and epoch == 0 else None
        shared = share(device, model, options, context, ranks, pages, by_hand)
        if shared is not None:
            edges, order, pages, together = shared.edges, shared.order(options), shared.pages, shared.together
            if options.tell is not None and shared.telling:
                options.tell(shared.text([link.name(rank) for rank in range(link.size)]))
    starts, ends = tuple(a for a, _ in edges), tuple(b for _, b in edges)
    drafts = 0 if draft is None else draft.pages * caches
    givers = shipping.givers(hellos, link.hosts, draft, targets)
    plan = Plan(
        starts, ends, threads, pages, drafts, order.rows, targets, epoch, givers, order.runs * order.blocks,
        order.sequences, together,
    )  # fmt: skip
    for rank in range(1, link.size):
        link.send(rank, CONTROL, plan)
    return plan, order


def _gather(link: Link, kind: type[Said], ranks: Collection[int], seconds: float | None = None) -> dict[int, Said]:
    """One such message of each of the ranks. Raises Lost when one fails, or hasn't answered within ``seconds``."""
    end = None if seconds is None else time.monotonic() + seconds
    heard: dict[int, Said] = {}
    while len(heard) < len(ranks):
        arrival = link.receive()
        if arrival is None:
            if end is not None and time.monotonic() > end:
                late = ", ".join(link.name(rank) for rank in ranks if rank not in heard)
                raise Lost(f"Not heard from within {seconds:.0f} s: {late}; look at that machine.")
            link.wait(0.1)
        elif isinstance(arrival.message, kind) and arrival.source in ranks:
            heard[arrival.source] = arrival.message
        elif isinstance(arrival.message, Failure):
            raise Failed(arrival.message.text)
        elif isinstance(arrival.message, Stop):
            raise Dismissed(arrival.message.status)
        elif not isinstance(arrival.message, Part):  # which was asked for before a rank was lost
            what = type(arrival.message).__name__
            raise BadMessage(f"A {what} came from {link.name(arrival.source)} where a {kind.__name__} was expected.")
    return heard


def _own(plan: Plan, rank: int) -> range:
    return range(plan.firsts[rank], plan.ends[rank])


def _ranks(plan: Plan) -> dict[int, int]:
    """Address -> rank. A drafter without layers is with the head."""
    drafter = plan.targets if plan.targets < len(plan.firsts) else 0
    return {MpiHead.HEAD: 0, MpiHead.DRAFTER: drafter, **{i: i for i in range(len(plan.firsts))}}


def _limits(model: Model, plan: Plan, number: int) -> Limits:
    return Limits(model.spec.vocab, plan.pages * PAGE, model.spec.width if number else 0)


def _load(model: Model, options: Options, plan: Plan, rank: int, draft: drafting.Draft | None) -> Mine:
    """This rank's layers, cache and device, within this rank's budget."""
    own, batch = _own(plan, rank), batch_threads(options, rank, len(plan.firsts))
    device = make_device(options.device, threads=plan.threads[rank], cpu=options.cpu, batch=batch)
    budget = Budget(options.ram)
    if receivers := plan.givers.count(rank) - (plan.givers[rank] == rank):
        budget.take("parts for other ranks", WINDOW * receivers, "leave --ship out")
    if draft is not None and rank >= plan.targets:
        draft.pages = plan.draft_pages
        draft.take(budget, device, plan.rows, own)
        stage, computer = draft.load(device, own=own)
        return Mine(stage, computer, computer.weights, budget, [draft.layers[i] for i in own])
    options = replace(options, rows=plan.rows, runs=plan.runs, sequences=plan.sequences)
    streamed = place(budget, device, model, plan.pages, options, own)
    weights = load_weights(device, model, streamed, options, own)
    cache = make_cache(device, model, plan.pages, options, own)
    computer = DeviceComputer(device, model.layers, own, model.spec.width, weights, cache)
    layers = [model.layers[i] for i in own]
    together = plan.together[rank] if plan.together else 0
    stage = Stage(own.start, own.stop, len(model.layers), plan.epoch, together)
    return Mine(stage, computer, weights, budget, layers)


def one_process(options: Options) -> Options:
    """The options of a run without other ranks. BadRequest for what only several ranks can do."""
    if options.ship:
        raise BadRequest("--ship is for several ranks, and there is one; leave it out, or start more with mpirun.")
    if options.layer_split is not None:
        parse(options.layer_split)
        check(parse(options.layer_split), 1, drafting=False)
    if len(options.rank_threads) > 1:
        raise BadRequest(f"{len(options.rank_threads)} thread counts are given and there is one rank; give one (-t).")
    return replace(options, threads=options.rank_threads[0]) if options.rank_threads else options
