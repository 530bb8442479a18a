"""The Python interface: load a model, stream or generate text.

with headrace.load("model.gguf") as engine:
    for piece in engine.stream("Once upon a time"):
        print(piece.text, end="")
"""

from __future__ import annotations

import itertools
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from headrace.cluster.journal import Book
from headrace.cluster.members import Link
from headrace.ensemble import lead, one_process
from headrace.errors import BadRequest, HeadraceError, Unavailable
from headrace.kernels.cpu import CpuDevice
from headrace.memory.weights import Resident
from headrace.options import Options
from headrace.results import Completion, Figures, Job, Piece, Totals
from headrace.run.head import Head
from headrace.run.trace import Recorder, chrome_trace
from headrace.run.types import Emit, Finish, Forget, Request, Sampling, Submit, Withdraw
from headrace.setup import Parts, build
from headrace.text.stream import StopMatcher, Stream

__all__ = ["Completion", "Engine", "Figures", "Job", "Options", "Piece", "Sampling", "load"]


class Engine:
    """A loaded model. Close it, or use it as a context manager.

    For one thread at a time, and for the process that loaded it; others are refused (BadRequest). Ctrl-C ends what is
    under way within a layer and is raised then; the engine can go on. After any other exception out of its depths it
    can't (Unavailable): what it was computing is lost.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.tokenizer = parts.tokenizer
        self.spec = parts.model.spec
        self.context = parts.context
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count()
        self._kept: tuple[int, tuple[int, ...]] | None = None
        self._failure: HeadraceError | None = None
        self._book: Book | None = None
        self._news: list[Emit | Finish] = []
        """To be told before the loop is asked."""
        self._closed = False
        self._working = threading.Lock()
        self._process = os.getpid()

    @property
    def head(self) -> Head:
        return self.parts.loop.head

    # --- one request ------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        keep: bool = False,
    ) -> Iterator[Piece]:
        """Continue ``prompt`` (text, or ids as they are), piece by piece.

        max_tokens None: up to the context's end. keep: leave the cache for the next stream that begins alike.
        Closing the generator cancels the request and gives everything back. Raises BadRequest.
        """
        job = self.submit(prompt, max_tokens, sampling, stop, ignore_eos, keep)
        return self._pieces(job)

    def _pieces(self, job: Job) -> Iterator[Piece]:
        try:
            while not job.finish:
                self.work()
                yield from job.fresh
                job.fresh.clear()
        finally:
            self.cancel(job.request.id)

    def figures(self, request: int | None = None) -> Figures:
        """Of a request under way, or of the last one submitted."""
        return self._jobs[request if request is not None else max(self._jobs)].figures

    # --- many requests ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Continue every prompt, many at a time. Each prompt's text is the same as alone.

        Raises BadRequest, before anything is computed, when one of them is bad.
        """
        if isinstance(prompts, str):
            raise BadRequest("One text is given where a list of prompts was expected; write [prompt].")
        encoded = [self.encode(prompt) for prompt in prompts]
        jobs = [self.submit(ids, max_tokens, sampling, stop, ignore_eos, False) for ids in encoded]
        try:
            while not all(job.finish for job in jobs):
                self.work()
        finally:
            for job in jobs:
                self.cancel(job.request.id)
        return [job.completion() for job in jobs]

    # --- the loop's side --------------------------------------------------------------------------------

    def cancel(self, request: int) -> None:
        """End a request if it isn't over, and work until everything of it is given back."""
        job = self._jobs.get(request)
        if job is None or job.finish or self._failure is not None or self._closed:
            return
        self.parts.loop.submit(Withdraw(request))
        if self._working.locked():  # by another thread, or this one: a stream may be collected at any moment
            return
        while not job.finish or not (self.head.live or self.head.waiting or self.parts.loop.idle):
            self.work()

    def interrupt(self) -> None:
        """End every request under way, within a layer; their streams finish as "cancelled".

        Only queues messages, so a signal handler may call it while the engine is at work.
        """
        for number, job in self._jobs.items():
            if not job.finish:
                self.parts.loop.submit(Withdraw(number))

    def bandwidth(self) -> float | None:
        """Bytes/s at which the threads read this model's own weights (at most 1 GiB of them) and do nothing else.

        None where they don't lie in memory. What a decode pass reads can be at most as fast.
        """
        device, weights = self.parts.device, self.parts.weights
        if not isinstance(device, CpuDevice) or not isinstance(weights, Resident):
            return None
        ends = itertools.accumulate(buffer.nbytes for buffer in weights.buffers)
        some = [buffer for buffer, end in zip(weights.buffers, ends, strict=True) if end - buffer.nbytes < 1 << 30]
        return device.bandwidth(some)

    def watch(self, trace: bool = False) -> None:
        """Look at what is computed from now on: for ``totals``, and with ``trace`` at every run."""
        self.parts.loop.watch(Recorder(trace, time.monotonic))

    def follow(self, book: Book) -> None:
        """Tell a launcher what is committed from now on, and take over what an earlier start had committed."""
        self._book = book
        book.salt = f"{self.parts.model.file.digest()} {self.parts.kv_bits}"

    def totals(self) -> Totals | None:
        """Sums over all ranks since ``watch``; None when nothing is watched. Raises Lost."""
        loop = self.parts.loop
        seen = loop.look()
        if seen is None:
            return None
        counts, stages = self.head.counts, range(loop.targets)
        hops = tuple(sum(n for (_, to), n in seen.hops.items() if to == i) for i in stages[1:])
        busy = tuple(seen.busy[i] for i in stages)
        return Totals(counts.launched, counts.accepted, counts.cancelled, busy, hops)

    def trace(self) -> str:
        """What ``watch(trace=True)`` saw, as ``run.trace.chrome_trace`` writes it. Raises Lost."""
        seen = self.parts.loop.look()
        return chrome_trace(seen or Recorder(), self.parts.loop.names(), self.parts.loop.targets)

    def close(self) -> None:
        """Cancel what is under way and give the memory back. Nothing happens the second time, or after a fork."""
        if self._closed or os.getpid() != self._process:
            return
        for request in list(self._jobs):
            self.cancel(request)
        self._closed = True
        self.parts.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Prompt ids, checked: BadRequest for an empty prompt, unknown ids, or one that leaves no room."""
        try:
            ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else map(operator.index, prompt))
        except TypeError:
            raise BadRequest(f"The prompt is {prompt!r:.40}; give text or a list of token ids.") from None
        if not ids:
            raise BadRequest("The prompt is empty; give at least one token of text.")
        wrong = [i for i in ids if not 0 <= i < self.spec.vocab]
        if wrong:
            raise BadRequest(f"Token id {wrong[0]} is not in the model's vocabulary of {self.spec.vocab}.")
        if len(ids) >= self.context:
            raise BadRequest(
                f"The prompt has {len(ids)} tokens and the context is {self.context}; shorten the prompt or give a "
                f"longer context (-c, up to {self.spec.context} for this model)."
            )
        return ids

    def submit(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        keep: bool = False,
    ) -> Job:
        """Queue a request; ``work`` computes it among the others. Raises BadRequest."""
        self._check()
        ids = self.encode(prompt)
        room = self.context - len(ids)
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise BadRequest(f"{max_tokens!r} tokens are asked for; ask for at least 1.")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise BadRequest(f"The stop texts are {stop!r:.40}; give a list of texts, none of them empty.")
        ends = frozenset() if ignore_eos else frozenset(self.tokenizer.ends)
        number = next(self._ids)
        request = Request(number, ids, min(room, max_tokens or room), sampling or Sampling(), ends, None, keep)
        if keep and self._kept is not None:
            request = replace(request, continues=self._kept[0])
        job = Job(request, Stream(self.tokenizer), StopMatcher(stop), Figures(prompt_tokens=len(ids)))
        job.figures.started = time.perf_counter()
        job.figures.weight_bytes = self.parts.pass_bytes
        if keep and self._kept is not None:
            job.figures.reused_tokens = _common(self._kept[1], ids[:-1])
        # Records of what is over would pile up in a program that runs for days; the last one's figures stay.
        self._jobs = {n: j for n, j in self._jobs.items() if not j.finish} | {number: job}
        self._start(request)
        return job

    def _start(self, request: Request) -> None:
        """Have a request computed, from where an earlier start of this job was."""
        known = self._book.begin(request, self.spec.vocab) if self._book is not None else ()
        end = len(request.tokens)
        self._news += [Emit(request.id, token, end + i) for i, token in enumerate(known)]
        left = request.max_tokens - len(known)
        if left and not (known and known[-1] in request.ends):
            self.parts.loop.submit(Submit(replace(request, tokens=request.tokens + known, max_tokens=left)))
        else:
            self._news.append(Finish(request.id, "length" if left == 0 and known[-1] not in request.ends else "end"))

    def work(self) -> list[Job]:
        """Let the loop work until it has something to tell; returns the jobs that are over now."""
        over = []
        with _ctrl_c(self.interrupt) as pressed:
            news, self._news = (self._news, []) if self._news else (self._pump(), [])
        for out in news:
            job = self._jobs[out.request]
            if isinstance(out, Emit):
                self._emit(job, out)
            else:
                self._finish(job, out)
                over.append(job)
        if self._book is not None:
            self._book.flush()
        if pressed:
            raise KeyboardInterrupt
        return over

    def _pump(self) -> list[Emit | Finish]:
        """The loop's next news. An exception leaves a step half done: from then on there is no way to go on."""
        self._check()
        if not self._working.acquire(blocking=False):
            raise BadRequest("The engine is computing for another thread; use it from one at a time.")
        try:
            return self.parts.loop.pump()
        except BaseException as error:
            what = f"{type(error).__name__} {error}".split("\n")[0].strip()
            again = Unavailable(f"The engine stopped at an earlier error ({what}); load the model again.")
            self._failure = error if isinstance(error, HeadraceError) else again
            raise
        finally:
            self._working.release()

    def _check(self) -> None:
        """Whether there is anything to compute with."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise BadRequest("The engine is closed; load the model again.")
        if os.getpid() != self._process:
            raise BadRequest("The engine was loaded before a fork and its threads are in the other process; load here.")

    def forget(self, job: Job) -> None:
        """Drop a finished job's record; for programs that run for days."""
        if job.finish:
            self._jobs.pop(job.request.id, None)
            if self._book is not None:
                self._book.over(job.request.id)

    def _emit(self, job: Job, out: Emit) -> None:
        if job.finish or job.stops.matched is not None:
            return
        now = time.perf_counter()
        job.figures.first = job.figures.first or now
        job.figures.last = now
        job.figures.tokens += 1
        job.tokens.append(out.token)
        if self._book is not None:
            self._book.token(out.request, out.token)
        if job.request.sampling.logprobs:
            job.choices.append(out)
        ended = out.token in job.request.ends
        text = job.stops.push("" if ended else job.stream.push(out.token))
        if text:
            job.text.append(text)
            job.fresh.append(Piece(text, (out.token,)))
        if job.stops.matched is not None:
            self.parts.loop.submit(Withdraw(job.request.id, "stop"))

    def _finish(self, job: Job, out: Finish) -> None:
        job.finish = out.reason
        tail = "" if job.stops.matched is not None else job.stops.push(job.stream.flush()) + job.stops.flush()
        if tail:
            job.text.append(tail)
        job.fresh.append(Piece(tail, (), out.reason))
        if job.request.keep:
            if self._kept is not None and self._kept[0] != job.request.id:
                self.parts.loop.submit(Forget(self._kept[0]))
            self._kept = (job.request.id, (*job.request.tokens, *job.tokens[:-1]))


@contextmanager
def _ctrl_c(interrupt: Callable[[], None]) -> Iterator[list[bool]]:
    """Ctrl-C that would raise KeyboardInterrupt calls ``interrupt`` and is noted in the list; a second one raises."""
    pressed: list[bool] = []
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return

    def handle(*_: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)
        interrupt()

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def load(path: str | Path, options: Options | None = None, *, link: Link | None = None, **changes: object) -> Engine:
    """Load a GGUF file or Hugging Face folder. Options by name: threads, context, kv_bits, ram, device, cpu ...

    link: this rank's place in a cluster (``cluster.mpi.join``), which must be rank 0; the other ranks call
    ``ensemble.serve`` with the same options. Checks the memory budget before any weight is read. Raises a
    HeadraceError that says what is wrong.
    """
    chosen = replace(options or Options(), **changes)  # type: ignore[arg-type]
    if link is None or link.size == 1:
        return Engine(build(Path(path), one_process(chosen)))
    return Engine(lead(Path(path), chosen, link))
