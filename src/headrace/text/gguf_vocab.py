"""A vocabulary from the metadata of a GGUF file (keys ``tokenizer.ggml.*``, GGUF specification, "Tokenizer")."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import BadFile, BadRequest, Unsupported
from headrace.text.bpe import WordEncoder, byte_alphabet
from headrace.text.vocab import Vocab, end_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""``tokenizer.ggml.token_type`` values."""

SPACE = "\u2581"
"""SentencePiece's visible space."""


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

    chain = Chain(
        [
            *(Split(Regex(p), "isolated") for p in patterns),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return lambda text: [word for word, _ in chain.pre_tokenize_str(text)]


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary of a GGUF file. Raises BadFile (missing, of the wrong type, inconsistent) or Unsupported."""
    model = _get(metadata, "model", str)
    if model not in ("gpt2", "llama"):
        raise Unsupported(
            f"tokenizer.ggml.model is {model!r}; Headrace reads 'gpt2' and 'llama' vocabularies: use another file."
        )
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, len(tokens))
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        raise BadFile("tokenizer.ggml.tokens holds the same token twice; get the file again or convert it again.")
    odd = [(i, t) for i, t in enumerate(types) if t != NORMAL]
    control = {tokens[i]: i for i, t in odd if t in (CONTROL, UNKNOWN)}
    user = {tokens[i]: i for i, t in odd if t == USER_DEFINED and tokens[i]}
    for name in [n for n in user if looks_control(n)]:
        control[name] = user.pop(name)
    control.pop("", None)
    build = _byte_level if model == "gpt2" else _sentencepiece
    return build(metadata, tokens, types, ids, control, user)


def looks_control(name: str) -> bool:
    """Whether a token is a template's own mark although a file calls it ordinary: ``<|x|>`` and its kin."""
    return bool(re.fullmatch(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_turn>", name))


def _byte_level(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    ids: dict[str, int],
    control: dict[str, int],
    user: dict[str, int],
) -> Vocab:
    name = _get(metadata, "pre", str, "default")
    kind = PRE_KINDS.get(name)
    if kind is None:
        raise Unsupported(
            f"tokenizer.ggml.pre is {name!r}, which Headrace doesn't know; it knows {', '.join(sorted(PRE_KINDS))}."
        )
    for key in ("add_space_prefix", "escape_whitespaces"):
        if _get(metadata, key, bool, False):
            raise Unsupported(f"tokenizer.ggml.{key} is set on a byte-level vocabulary, which Headrace doesn't know.")
    merges = _strings(metadata, "merges")
    # The first of equal merges counts, hence backwards.
    ranks: dict[str, float] = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    for special in control:
        del ids[special]
    # Bytes that no token stands for vanish, as in every reader of such vocabularies; ``missing`` tells of them.
    words = WordEncoder(ids, ranks, " ", lambda s: [ids[c] for c in s if c in ids], kind.whole_words)
    missing = frozenset(b for b, c in byte_alphabet().items() if c not in ids)
    split = word_splitter(kind.patterns)

    def encode(text: str, first: bool) -> list[int]:
        out: list[int] = []
        for word in split(text):
            out += words(word)
        return out

    literal = {*control.values(), *user.values()}
    piece = byte_level_piece(tokens.__getitem__, literal)
    vocab = _finish(metadata, tokens, control, user, encode, piece, kind.add_bos, {})
    return replace(vocab, missing=missing)


def byte_level_piece(name: Callable[[int], str], literal: set[int]) -> Callable[[int], bytes]:
    """Bytes of a byte-level token: a byte a character, or its name as it is for the ``literal`` ids."""
    back = {c: b for b, c in byte_alphabet().items()}

    def piece(i: int) -> bytes:
        text = name(i)
        if i in literal:
            return text.encode()
        try:
            return bytes([back[c] for c in text])
        except KeyError:
            return text.encode()  # Some files list added tokens as ordinary ones.

    return piece


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    ids: dict[str, int],
    control: dict[str, int],
    user: dict[str, int],
) -> Vocab:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise BadFile("tokenizer.ggml.scores is missing or not as long as tokenizer.ggml.tokens; get the file again.")
    prefix = _get(metadata, "add_space_prefix", bool, True)
    # A rank is the negated score of the token made: the best score merges first.
    ranks: dict[str, float] = dict(zip(tokens, [-s for s in _floats(scores)], strict=True))
    byte_ids = {tokens[i]: i for i, t in enumerate(types) if t == BYTE}
    # Neither control nor byte tokens are made by merging: text that reads "<s>" or "<0x41>" is just text.
    for special in (*control, *byte_ids):
        del ids[special], ranks[special]
    unk = _token(metadata, "unknown", len(tokens), 0)
    by_byte = [byte_ids.get(f"<0x{b:02X}>", unk) for b in range(256)]

    def spell(symbol: str) -> list[int]:
        found = [by_byte[b] for b in symbol.encode()]
        if any(i is None for i in found):
            raise BadRequest(f"This model's vocabulary has no token for {symbol!r}: leave it out.")
        return [i for i in found if i is not None]

    words = WordEncoder(ids, ranks, "", spell)
    # No token reaches over the start of a word in most vocabularies; then words encode one by one.
    crosses = re.search(f"[^{SPACE}\0]{SPACE}", "\0".join(ids)) is not None
    cut = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")

    def encode(text: str, first: bool) -> list[int]:
        text = (" " + text if prefix and first else text).replace(" ", SPACE)
        out: list[int] = []
        for word in [text] if crosses else cut.split(text):
            out += words(word)
        return out

    literal = {*control.values(), *user.values()}
    piece = sentencepiece_piece(tokens.__getitem__, literal, {i: int(t[3:5], 16) for t, i in byte_ids.items()})
    return _finish(metadata, tokens, control, user, encode, piece, True, {"bos": 1, "eos": 2, "unk": 0}, prefix)


def sentencepiece_piece(
    name: Callable[[int], str], literal: set[int], byte_of: Mapping[int, int]
) -> Callable[[int], bytes]:
    """Bytes of a SentencePiece token: visible spaces become spaces; ``byte_of`` are the byte tokens."""

    def piece(i: int) -> bytes:
        byte = byte_of.get(i)
        if byte is not None:
            return bytes([byte])
        text = name(i)
        return (text if i in literal else text.replace(SPACE, " ")).encode()

    return piece


def _finish(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    control: Mapping[str, int],
    user: Mapping[str, int],
    encode: Callable[[str, bool], list[int]],
    piece: Callable[[int], bytes],
    add_bos: bool,
    defaults: Mapping[str, int],
    prefix: bool = False,
) -> Vocab:
    size = len(tokens)
    bos = _token(metadata, "bos", size, defaults.get("bos"))
    eos = _token(metadata, "eos", size, defaults.get("eos"))
    add_bos = _get(metadata, "add_bos_token", bool, add_bos)
    if add_bos and bos is None:
        raise BadFile("tokenizer.ggml.add_bos_token is set but bos_token_id isn't; get the file again.")
    given = {i for i in (eos, *(_token(metadata, k, size, None) for k in ("eot", "eom"))) if i is not None}
    return Vocab(
        size=size,
        encode=encode,
        piece=piece,
        control=control,
        user=user,
        bos=bos,
        eos=eos,
        unk=_token(metadata, "unknown", size, defaults.get("unk")),
        pad=_token(metadata, "padding", size, None),
        ends=end_ids(control, given),
        add_bos=add_bos,
        space_prefix=prefix,
        template=_text(metadata.get("tokenizer.chat_template"), "tokenizer.chat_template"),
    )


def _text(value: Any, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadFile(f"{key} is a {type(value).__name__}, not a string; get the file again.")
    return value


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is None:
        raise BadFile(f"The file has no {key}: it holds no vocabulary; use a complete model file.")
    if not isinstance(value, kind):
        raise BadFile(f"{key} is a {type(value).__name__}, not a {kind.__name__}; get the file again.")
    return value


def _token(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < size else None
    if isinstance(value, bool) or int(value) != value or not 0 <= value < size:
        raise BadFile(f"{key} is {value!r}, outside the vocabulary of {size:,}; get the file again.")
    return int(value)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None or isinstance(values, str | bytes) or not len(values):
        raise BadFile(f"The file has no tokenizer.ggml.{name}: its vocabulary is incomplete; get the file again.")
    values = list(values)
    if not isinstance(values[0], str) or not all(map(str.__instancecheck__, values)):
        raise BadFile(f"tokenizer.ggml.{name} isn't a list of strings; get the file again.")
    return values


def _floats(values: Any) -> list[float]:
    return list(map(float, values.tolist() if hasattr(values, "tolist") else values))


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    values = metadata.get("tokenizer.ggml.token_type")
    if values is None:
        return [NORMAL] * count
    if len(values) != count:
        raise BadFile("tokenizer.ggml.token_type isn't as long as tokenizer.ggml.tokens; get the file again.")
    return [int(v) for v in values]
