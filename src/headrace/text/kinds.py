"""The two kinds of vocabulary, byte-level and SentencePiece: text to ids and ids to bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import BadRequest
from headrace.text.bpe import byte_alphabet, word_encoder

SPACE = "\u2581"
"""SentencePiece's visible space."""

Encode = Callable[[str, bool], list[int]]
"""``Vocab.encode``"""


@dataclass(frozen=True)
class PreKind:
    """How a byte-level vocabulary cuts text into words: each pattern cuts further what the ones before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


# The patterns are those of the models' own tokenizer.json files.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
)
_GPT4O = _CASED % (_CONTRACTION + "?", _CONTRACTION + "?", r"\p{N}{1,3}")
_TEKKEN = _CASED % ("", "", r"\p{N}")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_OLD = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_KINDS: dict[str, PreKind] = {
    "default": PreKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": PreKind((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreKind((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreKind((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe glm4": PreKind((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open kormo grok-2": PreKind((_QWEN2,)),
    "qwen35": PreKind(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES,)
    ),
    "falcon": PreKind((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "gpt-4o llama4 kanana2": PreKind((_GPT4O,)),
    "tekken": PreKind((_TEKKEN,), True, True),
    "deepseek-coder": PreKind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OLD, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreKind((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "seed-coder": PreKind((_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES,)),
}
PRE_KINDS: dict[str, PreKind] = {name: kind for names, kind in _KINDS.items() for name in names.split()}


def word_splitter(patterns: Sequence[str]) -> Callable[[str], list[str]]:
    """Text to byte-level words: each pattern's matches, and what lies between them, become words of their own."""
    # Imported here: it takes 30 ms, and SentencePiece files never need it.
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Split
    from tokenizers.pre_tokenizers import Sequence as Chain

    cuts = [Split(Regex(p), "isolated") for p in patterns]
    chain = Chain([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    return lambda text: [word for word, _ in chain.pre_tokenize_str(text)]


def byte_level_encoder(ids: Mapping[str, int], merges: Sequence[str], kind: PreKind) -> tuple[Encode, frozenset[int]]:
    """Text to ids, and the bytes that no token stands for: they vanish, as in every reader of such vocabularies.

    ids: without control tokens. merges: "left right", the first counts most.
    """
    # The first of equal merges counts, hence backwards.
    ranks: dict[str, float] = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    words = word_encoder(ids, ranks, " ", lambda s: [ids[c] for c in s if c in ids], kind.whole_words)
    split = word_splitter(kind.patterns)

    def encode(text: str, start: bool) -> list[int]:
        return [i for word in split(text) for i in words(word)]

    return encode, frozenset(b for b, c in byte_alphabet().items() if c not in ids)


def byte_level_piece(name: Callable[[int], str], literal: Iterable[int]) -> Callable[[int], bytes]:
    """Bytes of a byte-level token: a byte a character, or its name as it is for the ``literal`` ids."""
    back = {c: b for b, c in byte_alphabet().items()}
    plain = frozenset(literal)

    def piece(i: int) -> bytes:
        text = name(i)
        if i in plain:
            return text.encode()
        try:
            return bytes([back[c] for c in text])
        except KeyError:
            return text.encode()  # Some files list added tokens as ordinary ones.

    return piece


def sentencepiece_encoder(
    ids: Mapping[str, int], ranks: Mapping[str, float], by_byte: Sequence[int | None], prefix: bool
) -> Encode:
    """Text to ids. ids and ranks: without control and byte tokens; by_byte: ids of the 256 bytes.

    A rank is the negated score of the token that a merge makes: the best score merges first.
    """

    def spell(symbol: str) -> list[int]:
        found = [i for b in symbol.encode() if (i := by_byte[b]) is not None]
        if len(found) < len(symbol.encode()):
            raise BadRequest(f"This model's vocabulary has no token for {symbol!r}: leave it out.")
        return found

    words = word_encoder(ids, ranks, "", spell)
    # No token reaches over the start of a word in most vocabularies; then words encode one by one.
    crosses = re.search(f"[^{SPACE}\0]{SPACE}", "\0".join(ids)) is not None
    cut = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")

    def encode(text: str, start: bool) -> list[int]:
        # After a control token too, as at the start: SentencePiece sees each piece as a text of its own.
        text = (" " + text if prefix else text).replace(" ", SPACE)
        return [i for word in ([text] if crosses else cut.split(text)) for i in words(word)]

    return encode


def sentencepiece_piece(
    name: Callable[[int], str], literal: Iterable[int], byte_of: Mapping[int, int]
) -> Callable[[int], bytes]:
    """Bytes of a SentencePiece token: visible spaces become spaces; ``byte_of``: the byte tokens' bytes."""
    plain = frozenset(literal)

    def piece(i: int) -> bytes:
        byte = byte_of.get(i)
        if byte is not None:
            return bytes([byte])
        text = name(i)
        return (text if i in plain else text.replace(SPACE, " ")).encode()

    return piece
