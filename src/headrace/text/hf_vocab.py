"""A vocabulary from a Hugging Face folder: tokenizer.json, or a byte-level vocab.json with merges.txt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import BadFile, Unsupported
from headrace.formats.files import read_text
from headrace.formats.folder import MAX_CONFIG, MAX_TOKENIZER, read_object
from headrace.text import kinds
from headrace.text.vocab import Vocab, end_ids, looks_control

if TYPE_CHECKING:
    import tokenizers

_BYTE_LEVEL_CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""How slow tokenizer classes with a vocab.json cut words (``kinds.PRE_KINDS``)."""
_MODEL_CLASSES = {"opt": "GPT2Tokenizer", "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}


@dataclass(frozen=True)
class _Folder:
    metadata: Mapping[str, Any]
    files: Mapping[str, Path]

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.metadata.get(name) or {}
        if not isinstance(value, Mapping):
            raise BadFile(f"{name}.json isn't a JSON object; download it again.")
        return value

    def special(self, name: str) -> str | None:
        """The text of a named special token, e.g. "bos_token"."""
        for section in ("tokenizer_config", "special_tokens_map"):
            value = self.section(section).get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                return value
        return None

    def flag(self, name: str) -> bool | None:
        value = self.section("tokenizer_config").get(name)
        return value if isinstance(value, bool) else None

    def numbers(self, name: str) -> list[int]:
        """Token ids that config.json or generation_config.json give: one, a list or none."""
        for section in ("generation_config", "config"):
            value = self.section(section).get(name)
            found = [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]
            if found:
                return found
        return []

    def template(self) -> str | None:
        if "chat_template.jinja" in self.files:
            return read_text(self.files["chat_template.jinja"], "chat template")
        value = self.section("tokenizer_config").get("chat_template")
        if isinstance(value, list):  # several, by name
            value = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}.get("default")
        if value is None and "chat_template.json" in self.files:
            value = read_object(self.files["chat_template.json"], MAX_CONFIG, "chat template").get("chat_template")
        if value is not None and not isinstance(value, str):
            raise BadFile("The chat template isn't a string; download the folder again.")
        return value


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """metadata: "files" (name -> path), "tokenizer_config", "special_tokens_map", "config", "generation_config".

    Raises BadFile (missing, damaged) or Unsupported, each with a remedy.
    """
    folder = _Folder(metadata, metadata.get("files") or {})
    if "tokenizer.json" in folder.files:
        return _from_library(folder)
    if "vocab.json" in folder.files and "merges.txt" in folder.files:
        return _from_merges(folder)
    if "tokenizer.model" in folder.files:
        raise Unsupported(
            "The folder's tokenizer is a tokenizer.model alone, which Headrace doesn't read; save it again with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)) or use a GGUF file."
        )
    raise BadFile("The folder has no tokenizer.json; download it too.")


def _from_library(folder: _Folder) -> Vocab:
    from tokenizers import Tokenizer

    path = folder.files["tokenizer.json"]
    text = read_text(path, "tokenizer")
    try:
        library = Tokenizer.from_str(text)
    except BaseException as e:  # the library raises bare Exception, and its panics aren't even that
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        raise BadFile(f"{path}: can't be read as a tokenizer ({str(e)[:200]}); download it again.") from None
    library.no_truncation()
    library.no_padding()
    added = library.get_added_tokens_decoder()
    special = [t for t in added.values() if t.special or looks_control(t.content)]
    for token in special:
        if token.single_word:
            raise Unsupported(f"{path}: the special token {token.content!r} is single_word, which Headrace doesn't do.")
    # Special tokens are text unless found by us, so that what users write can't contain one.
    library.add_special_tokens(special)
    library.encode_special_tokens = True
    names = {t.content for t in special}
    control = {t.content: i for i, t in added.items() if t.content in names}
    size = max([library.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
    piece = _library_piece(library, set(added), set(control.values()), path)
    strip = {control[t.content]: (t.lstrip, t.rstrip) for t in special if t.lstrip or t.rstrip}
    space = _writes_space(library)
    vocab = Vocab(size, _library_encoder(library), piece, control, strip=strip, space_prefix=space)
    ids = {name: i for name in _special_names(folder) if (i := library.token_to_id(name)) is not None}
    return _finish(folder, vocab, ids, library.encode("", add_special_tokens=True).ids[:1])


def _library_encoder(library: tokenizers.Tokenizer) -> kinds.Encode:
    """A Metaspace that marks only the start of a text leaves the pieces after a control token alone."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import Metaspace

    rest = library
    state = _state(library.pre_tokenizer)
    if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
        rest = Tokenizer.from_str(library.to_str())
        rest.encode_special_tokens = True
        rest.pre_tokenizer = Metaspace(state["replacement"], "never", state["split"])
    return lambda text, start: list((library if start else rest).encode(text, add_special_tokens=False).ids)


def _library_piece(
    library: tokenizers.Tokenizer, added: set[int], control: set[int], path: Path
) -> Callable[[int], bytes]:
    def name(i: int) -> str:
        return library.id_to_token(i) or ""

    steps = _steps(library.decoder)
    types = {s.get("type") for s in steps}
    if "ByteLevel" in types:
        return kinds.byte_level_piece(name, added)
    if "Metaspace" in types or any(s.get("pattern") == {"String": kinds.SPACE} for s in steps):
        bytes_of = {} if "ByteFallback" not in types else {
            i: b for b in range(256) if (i := library.token_to_id(f"<0x{b:02X}>")) is not None
        }  # fmt: skip
        return kinds.sentencepiece_piece(name, control, bytes_of)
    raise Unsupported(
        f"{path}: its decoder ({', '.join(sorted(map(str, types))) or 'none'}) isn't byte-level or SentencePiece; "
        "Headrace reads no other."
    )


def _writes_space(library: tokenizers.Tokenizer) -> bool:
    """Whether decoding drops a first space: a Strip step, or a Metaspace that prepends one."""
    return any(
        (s.get("type") == "Strip" and s.get("content") == " " and s.get("start"))
        or (s.get("type") == "Metaspace" and s.get("prepend_scheme") != "never")
        for s in _steps(library.decoder)
    )


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _steps(decoder: Any) -> list[dict[str, Any]]:
    state = _state(decoder)
    return state["decoders"] if state.get("type") == "Sequence" else [state]


def _from_merges(folder: _Folder) -> Vocab:
    model = folder.section("config").get("model_type")
    name = folder.section("tokenizer_config").get("tokenizer_class") or _MODEL_CLASSES.get(str(model))
    pre = _BYTE_LEVEL_CLASSES.get(str(name).removesuffix("Fast"))
    if pre is None:
        raise Unsupported(
            f"The folder has a vocab.json without a tokenizer.json, of the tokenizer class {name!r}; Headrace reads "
            f"{', '.join(_BYTE_LEVEL_CLASSES)}: save it again with transformers, which writes tokenizer.json."
        )
    if folder.flag("add_prefix_space"):
        raise Unsupported("tokenizer_config.json sets add_prefix_space, which Headrace doesn't do with a vocab.json.")
    ids = _ids(folder.files["vocab.json"])
    extra = _ids(folder.files["added_tokens.json"]) if "added_tokens.json" in folder.files else {}
    names = {n for n in _special_names(folder) if n in ids or n in extra} | {n for n in extra if looks_control(n)}
    ids |= extra
    control = {n: ids[n] for n in names}
    user = {n: i for n, i in extra.items() if n not in control}
    by_id = {i: n for n, i in ids.items()}
    lines = read_text(folder.files["merges.txt"], "list of merges").splitlines()
    merges = [m for m in lines if m and not m.startswith("#version")]
    ordinary = {n: i for n, i in ids.items() if n not in control}
    encode, _ = kinds.byte_level_encoder(ordinary, merges, kinds.PRE_KINDS[pre])
    piece = kinds.byte_level_piece(lambda i: by_id.get(i, ""), {*control.values(), *user.values()})
    return _finish(folder, Vocab(max(by_id) + 1, encode, piece, control, user), ids)


def _finish(folder: _Folder, vocab: Vocab, ids: Mapping[str, int], adds: Iterable[int] = ()) -> Vocab:
    """With what the folder says of special tokens. ids: of their names; adds: what the library begins a text with."""

    def token(name: str) -> int | None:
        text = folder.special(f"{name}_token")
        if text is not None and text in ids:
            return ids[text]
        given = folder.numbers(f"{name}_token_id")
        return given[0] if given and given[0] < vocab.size else None

    bos, eos = token("bos"), token("eos")
    given = {i for i in (eos, *folder.numbers("eos_token_id")) if i is not None and i < vocab.size}
    add_bos = folder.flag("add_bos_token")
    if add_bos is None:
        add_bos = bos is not None and list(adds) == [bos]
    if add_bos and bos is None:
        raise BadFile("tokenizer_config.json sets add_bos_token but names no bos_token; download the folder again.")
    return replace(
        vocab, bos=bos, eos=eos, unk=token("unk"), pad=token("pad"), ends=end_ids(vocab.control, given),
        add_bos=add_bos, template=folder.template(),
    )  # fmt: skip


def _special_names(folder: _Folder) -> set[str]:
    names = {folder.special(f"{n}_token") for n in ("bos", "eos", "unk", "pad", "mask", "sep", "cls")}
    for section in ("tokenizer_config", "special_tokens_map"):
        more = folder.section(section).get("additional_special_tokens") or []
        names |= {t.get("content") if isinstance(t, Mapping) else t for t in more}
    added = folder.section("tokenizer_config").get("added_tokens_decoder") or {}
    names |= {t.get("content") for t in added.values() if isinstance(t, Mapping) and t.get("special")}
    return {n for n in names if isinstance(n, str) and n}


def _ids(path: Path) -> dict[str, int]:
    found = read_object(path, MAX_TOKENIZER, "vocabulary")
    ids = {name: i for name, i in found.items() if isinstance(i, int) and 0 <= i < 1 << 24}
    if not ids or len(ids) < len(found):
        raise BadFile(f"{path}: doesn't map tokens to ids; download it again.")
    return ids
