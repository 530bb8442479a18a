"""Guessing in the product: which drafters are asked for, what they take of the memory, the policy they go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from headrace.errors import BadRequest, Unsupported
from headrace.kernels.device import Device, Weight
from headrace.memory.budget import Budget
from headrace.memory.kv import HostKV, kv_shapes, page_nbytes
from headrace.memory.slots import pages_for
from headrace.memory.weights import Resident, Weights
from headrace.model.layers import Layer, Model, load_model
from headrace.options import Options
from headrace.placement import held_nbytes, open_file, scratch_nbytes
from headrace.run.compute import DeviceComputer
from headrace.run.policy import GuessPolicy, NoGuesses
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.speculate.drafters import Drafter, Merged, NGram
from headrace.speculate.grow import Growth, ModelDrafter
from headrace.speculate.growth import Once
from headrace.speculate.learned import Learned, Restful
from headrace.speculate.pipeinfer import Knobs, Microbatches, PipeInfer
from headrace.speculate.rates import Rates
from headrace.speculate.serial import Clocked, Frugal, Serial
from headrace.speculate.sync import Synchronous
from headrace.speculate.vocab import Translated, VocabMap
from headrace.text.tokenizer import Tokenizer

NGRAM, LAYERS = "ngram", "layers:"
POLICIES = ("ours", "pipeinfer", "sync")
BOUNDS = ("draft", "np", "pa")
"""Knobs that bound our policy too: rows of guesses in a run, choices at each place, the least chance of a guess."""
SPARE = 16
"""Pages of a drafter's cache beyond the context, for its tree."""


@dataclass(frozen=True)
class Wish:
    """What drafters are asked for: prompt lookup, a draft model, so many of the target's first blocks."""

    ngram: bool = False
    model: Path | None = None
    layers: int | None = None
    policy: str = "ours"
    knobs: Mapping[str, float] = field(default_factory=dict)
    staged: bool = False
    """Prompt lookup drafts for the drafter with layers."""

    def __bool__(self) -> bool:
        return self.ngram or self.computes

    @property
    def computes(self) -> bool:
        """Whether a drafter has layers of its own."""
        return self.model is not None or self.layers is not None

    def knob(self, name: str, default: float) -> float:
        return self.knobs.get(name, default)

    @property
    def pipeinfer(self) -> Knobs:
        k = self.knobs
        return Knobs(int(k.get("draft", 16)), int(k.get("np", 1)), *(k.get(n, d) for n, d in _CUTOFFS))

    @property
    def most(self) -> int:
        """Most guesses in a run."""
        return int(self.knob("draft", {"ours": 63, "pipeinfer": 16, "sync": 8}[self.policy]))


_CUTOFFS = (("pa", 0.5), ("ps", 0.1), ("pr", 0.0), ("pd", 0.0))


def wish_of(options: Options) -> Wish:
    """What the options ask for. BadRequest or Unsupported names what can't be, and a remedy."""
    named = (options.drafter,) if isinstance(options.drafter, str | Path) else tuple(options.drafter)
    models = [Path(n) for n in named if n != NGRAM and not str(n).startswith(LAYERS)]
    layers = [_count(str(n)) for n in named if str(n).startswith(LAYERS)]
    if len(models) + len(layers) > 1:
        raise Unsupported("One drafter can have layers of its own: give one draft model, or --draft-layers.")
    known = {f.name for f in fields(Knobs)}
    if wrong := [name for name in options.knobs if name not in known]:
        raise BadRequest(f"There is no knob {wrong[0]!r} for guesses; there are: {', '.join(sorted(known))}.")
    if options.policy not in POLICIES:
        raise BadRequest(f"There is no policy {options.policy!r}; there are: {', '.join(POLICIES)}.")
    if options.policy != "pipeinfer":
        bounds = BOUNDS if options.policy == "ours" else ("draft",)
        if idle := [f"-{name}" for name in options.knobs if name not in bounds]:
            raise BadRequest(f"{', '.join(idle)} has no meaning for the policy {options.policy!r}; leave it out.")
    model, count = models[0] if models else None, layers[0] if layers else None
    wish = Wish(NGRAM in named, model, count, options.policy, options.knobs, options.draft_for_draft is not None)
    if options.draft_for_draft not in (None, NGRAM):
        raise BadRequest(f"{options.draft_for_draft!r} can't draft for a draft; {NGRAM!r} can.")
    if wish.staged and not wish.computes:
        raise BadRequest("There is no draft to draft for (--draft-for-draft); give -md MODEL or --draft-layers.")
    if not wish and (options.knobs or options.policy != "ours"):
        raise BadRequest(
            "Options for guesses are given and no drafter; give -md MODEL, --draft-layers or --draft-ngram."
        )
    if wish and options.kv_disk is not None:
        raise Unsupported("Guesses need the whole cache in memory; leave out --kv-disk or the drafter.")
    if wish.policy == "pipeinfer" and not wish.computes:
        raise BadRequest("PipeInfer's policy needs a draft model; give -md MODEL or --draft-layers.")
    return wish


def _count(text: str) -> int:
    number = text.removeprefix(LAYERS)
    if not number.isdecimal() or int(number) < 1:
        raise BadRequest(f"{text!r} is no drafter; write layers:N with N of 1 or more.")
    return int(number)


# --- the head's side --------------------------------------------------------------------------------------


def policy_of(wish: Wish) -> GuessPolicy:
    """The policy for one process, where target and drafter take turns."""
    if not wish:
        return NoGuesses()
    if wish.policy == "pipeinfer":
        return PipeInfer(wish.pipeinfer)
    if wish.policy == "sync":
        return Synchronous(512)
    return Serial(wish.most, floor=max(0.02, wish.knob("pa", 0.0)))


def rank_policy(wish: Wish, share: float) -> GuessPolicy:
    """The policy over ranks. share: the slowest stage's part of a pass, as far as is known."""
    if not wish or wish.policy != "ours":
        return policy_of(wish)
    return Learned(share, int(min(wish.most, 64)), floor=max(0.01, wish.knob("pa", 0.0)))


def order_of(wish: Wish, order: Order, stages: int = 0) -> Order:
    """The order with room for guesses. stages: of the target, 0 where everything takes turns in one process."""
    if not wish:
        return order
    blocks = {"ours": 4 * stages + 8 if stages else 1, "pipeinfer": 2 * stages + 4, "sync": 1}[wish.policy]
    return replace(order, guesses=min(wish.most, order.rows), blocks=blocks)


# --- drafters ---------------------------------------------------------------------------------------------


class Mapped:
    """Some layers of held weights under other numbers."""

    def __init__(self, weights: Weights, numbers: Sequence[int]) -> None:
        self.weights, self.numbers = weights, numbers
        self.lasting = weights.lasting

    def hold(self, layer: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.weights.hold(self.numbers[layer])

    def stays(self, layer: int) -> bool:
        return self.weights.stays(self.numbers[layer])

    def close(self) -> None:
        """They are another's."""


def first_layers(model: Model, count: int) -> list[int]:
    """Numbers of the layers of a draft made of the model's first blocks: those, embedding and output."""
    blocks = len(model.layers) - 2
    if count >= blocks:
        raise BadRequest(f"The model has {blocks} blocks and a draft of {count} is asked for; give fewer.")
    return [*range(count + 1), len(model.layers) - 1]


@dataclass
class Draft:
    """A drafter with layers, before it is loaded: its model, its layers, its place in memory."""

    model: Model
    numbers: list[int]
    words: VocabMap | None
    own: bool
    """It has a file of its own, not the target's."""
    pages: int
    kv_bits: tuple[int, int]
    vocab: int
    """Ids that may stand in messages about it: its own and the target's."""
    share: float
    """Its bytes as part of the target's."""
    computer: DeviceComputer | None = None

    @property
    def layers(self) -> list[Layer]:
        return [self.model.layers[i] for i in self.numbers]

    def take(self, budget: Budget, device: Device, rows: int, own: range | None = None) -> None:
        """Count it, or a rank's part of it, before the target's own layers take the rest."""
        numbers = self.numbers if own is None else [self.numbers[i] for i in own]
        layers = [self.model.layers[i] for i in numbers]
        weights = sum(held_nbytes(device, self.model, numbers).values()) if self.own or own is not None else 0
        cache = page_nbytes(device, layers, self.kv_bits) * self.pages
        scratch = scratch_nbytes(device, self.model, rows, layers)
        budget.take("draft model", weights + cache + scratch, "leave the draft model out, or give a larger --ram")

    def load(
        self, device: Device, weights: Weights | None = None, own: range | None = None
    ) -> tuple[Stage, DeviceComputer]:
        """weights: the target's, where the layers are its own, and stay. own: a rank's part of the draft's layers."""
        held: Weights
        layers = self.layers
        own = range(len(layers)) if own is None else own
        if weights is not None and not self.own:
            held = Mapped(weights, self.numbers)
        else:
            held = Mapped(Resident(device, self.model, [self.numbers[i] for i in own]), self.numbers)
        shapes = {i: shape for i, shape in kv_shapes(layers, self.kv_bits).items() if i in own}
        cache = HostKV(device, shapes, self.pages)
        self.computer = DeviceComputer(device, layers, own, self.model.spec.width, held, cache)
        return Stage(own.start, own.stop, len(layers)), self.computer

    def close(self) -> None:
        if self.computer is not None:
            self.computer.close()
        if self.own:
            self.model.file.close()


def draft_of(wish: Wish, target: Model, tokenizer: Tokenizer, options: Options, context: int) -> Draft | None:
    """Open and understand the drafter's model. Raises a HeadraceError; close its file when done with it."""
    if not wish.computes:
        return None
    pages = (pages_for(context) + SPARE) * (options.caches or 1)
    if wish.model is None:
        assert wish.layers is not None
        vocab = target.spec.vocab
        numbers = first_layers(target, wish.layers)
        share = _nbytes([target.layers[i] for i in numbers]) / _nbytes(target.layers)
        return Draft(target, numbers, None, False, pages, options.kv_bits, vocab, share)
    file = open_file(wish.model, replace(options, requant=None))
    try:
        model = load_model(file)
        other = Tokenizer.from_metadata(file.metadata)
        other.check_model(model.spec.vocab)
        texts = list(texts_of(tokenizer)), list(texts_of(other))
        same = texts[0] == texts[1] and model.spec.vocab <= target.spec.vocab
        words = None if same else VocabMap(*texts)
        vocab = max(model.spec.vocab, target.spec.vocab)
        share = _nbytes(model.layers) / _nbytes(target.layers)
        return Draft(model, list(range(len(model.layers))), words, True, pages, options.kv_bits, vocab, share)
    except BaseException:
        file.close()
        raise


def _nbytes(layers: Sequence[Layer]) -> int:
    """Of the weights that a row reads: a tied output is read, an embedding isn't."""
    tied = sum(plan.nbytes for plan in layers[-1].tensors.values() if plan.shares is not None)
    return sum(layer.nbytes for layer in layers[1:]) + tied


def texts_of(tokenizer: Tokenizer) -> Iterator[bytes | None]:
    """Each id's bytes, None for control tokens."""
    for i in range(tokenizer.size):
        yield None if tokenizer.is_control(i) else tokenizer.token_bytes(i)


def growth_of(wish: Wish, policy: Serial | None, share: float) -> Growth:
    """How a model drafter grows its tree: in turns with the target under a ``Serial`` policy, else on its own.

    share: of the target's bytes that the drafter has."""
    if wish.policy == "pipeinfer":
        return Microbatches(wish.pipeinfer)
    if wish.policy == "sync":
        return Once(wish.most)
    width = int(wish.knob("np", 5))
    return Restful(Rates(), width) if policy is None else Frugal(policy, width, share=share)


def drafter_of(wish: Wish, draft: Draft | None, policy: GuessPolicy | None = None) -> Drafter | None:
    """All drafters that are asked for, as one. policy: where it is in the same process."""
    serial = policy if isinstance(policy, Serial) else None
    found: list[Drafter] = []
    if wish.ngram:
        found.append(NGram(branches=int(min(wish.knob("np", 2), 2)), least=serial.least if serial else None))
    if draft is not None:
        growth, number = growth_of(wish, serial, draft.share), len(found)
        cheap = NGram(branches=1, least=lambda: 2.0) if wish.staged else None
        made: Drafter
        if isinstance(growth, Frugal | Restful):
            made = Clocked(draft.pages, growth, number, serial.spend if serial else None, cheap)
        else:
            made = ModelDrafter(draft.pages, growth, number, most=128, cheap=cheap)
        found.append(Translated(made, draft.words) if draft.words else made)
    return Merged(found) if len(found) > 1 else found[0] if found else None
