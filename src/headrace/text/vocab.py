"""What a tokenizer needs to know of a vocabulary, wherever it was read from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vocab:
    """One vocabulary. Ids are 0..size-1."""

    size: int
    encode: Callable[[str, bool], list[int]]
    """Ids of a piece of ordinary text. The flag: the piece starts the text; otherwise it follows a token."""
    piece: Callable[[int], bytes]
    """Bytes of a token; for a control token the UTF-8 of its name."""
    control: Mapping[str, int]
    """Tokens that only a template or the caller's own markup may produce, by name."""
    user: Mapping[str, int] = field(default_factory=dict)
    """Tokens that are looked for in any text before it is encoded, by name; longer ones first."""
    strip: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """Control tokens that swallow white space on their left or right."""
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    ends: frozenset[int] = frozenset()
    """Ids that end a generation."""
    add_bos: bool = False
    space_prefix: bool = False
    """A text starts with a space that isn't written (SentencePiece)."""
    missing: frozenset[int] = frozenset()
    """Bytes that can't be encoded and are left out (a byte-level vocabulary may lack rare ones)."""
    template: str | None = None
    """The chat template, jinja2 source."""


END_NAMES = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s> <eos> <|eom_id|> <EOT>
    [EOT] [EOS] <|end_of_text|> <end_of_utterance> <｜end▁of▁sentence｜>""".split()  # noqa: SIM905
"""Control tokens that end a turn or a text in some family, named in no metadata key (collected from model cards)."""


def end_ids(control: Mapping[str, int], given: set[int]) -> frozenset[int]:
    """``given`` (from metadata) and every control token named in ``END_NAMES``.

    Harmony vocabularies use ``<|end|>`` between messages of one answer, so there it ends nothing.
    """
    found = {control[name] for name in END_NAMES if name in control}
    if "<|return|>" in control and "<|call|>" in control and "<|end|>" in control:
        found.discard(control["<|end|>"])
    return frozenset(found | given)


def looks_control(name: str) -> bool:
    """Whether a token is a template's own mark although a file calls it ordinary: ``<|x|>`` and its kin."""
    return re.fullmatch(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_turn>", name) is not None
