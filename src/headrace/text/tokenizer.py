"""Text to ids and back. The one rule: text that a user wrote never becomes a control token.

``encode(text)`` finds no control tokens at all. ``encode(text, special=True)`` finds them wherever they are written,
for text that is wholly the caller's own. A rendered chat template is both: ``template.py`` puts a guard character
into what users wrote, and ``encode(text, special=True, guard=c)`` finds control tokens in what is left unguarded,
then drops the guards. Everything between two control tokens is encoded in one piece, so the ids are those of an
unguarded text whenever users wrote no control token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import BadFile, BadRequest
from headrace.text import gguf_vocab, hf_vocab
from headrace.text.vocab import Vocab

_PREFIX = 3


class _Finder:
    """Splits text at known names: longer names first over the whole text, as llama.cpp and SentencePiece do."""

    def __init__(self, names: Mapping[str, int], strip: Mapping[int, tuple[bool, bool]]) -> None:
        self._strip = strip
        # Thousands of names share few beginnings; one search tells that none of a group is there.
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name[:_PREFIX], []).append(name)
        self._groups = list(groups.items())
        self._names = names

    def split(self, text: str) -> list[str | int]:
        """The text in order: pieces of it, and ids where a name stood."""
        present = [n for start, names in self._groups if start in text for n in names if n in text]
        parts: list[str | int] = [text] if text else []
        for name in sorted(present, key=lambda n: (-len(n.encode()), self._names[n])):
            parts = [q for p in parts for q in ([p] if isinstance(p, int) else self._cut(p, name))]
        return parts

    def _cut(self, text: str, name: str) -> Iterable[str | int]:
        i = self._names[name]
        left, right = self._strip.get(i, (False, False))
        pieces = text.split(name)
        for at, piece in enumerate(pieces):
            if at and right:
                piece = piece.lstrip()
            if at < len(pieces) - 1 and left:
                piece = piece.rstrip()
            if at:
                yield i
            if piece:
                yield piece


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.size = vocab.size
        """Number of ids."""
        self.bos, self.eos, self.unk, self.pad = vocab.bos, vocab.eos, vocab.unk, vocab.pad
        self.ends = vocab.ends
        """Ids that end a generation: end of text, of turn, of message."""
        self.add_bos = vocab.add_bos
        self.template = vocab.template
        self._rows = vocab.size
        self._control_ids = frozenset(vocab.control.values())
        # Some vocabularies write what they can't spell as "unknown", which does no harm unless it ends a text.
        self._forbidden = self._control_ids - ({vocab.unk} - vocab.ends)
        self._control = _Finder(vocab.control, vocab.strip)
        self._user = _Finder(vocab.user, {})
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From ``ModelFile.metadata``, of a GGUF file or a Hugging Face folder. Raises BadFile, Unsupported."""
        reader = hf_vocab if {"config", "files"} & metadata.keys() else gguf_vocab
        return cls(reader.read_vocab(metadata))

    def check_model(self, rows: int) -> None:
        """Raise BadFile if the model's vocabulary (``rows`` embeddings) is smaller than this; more is padding."""
        if self.size > rows:
            raise BadFile(
                f"The tokenizer has {self.size:,} tokens but the model only {rows:,}: they don't belong together; "
                "get both from the same place."
            )
        self._rows = rows

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, guard: str | None = None
    ) -> list[int]:
        """Ids of ``text``. ``special``: control tokens written in it count as such; otherwise they are plain text.

        ``add_bos``: begin with the beginning-of-text token, if the text itself doesn't (None: as the model wants).
        ``guard``: a character that marks what users wrote; removed. No end-of-text token is ever added.
        Bytes in ``vocab.missing`` are left out. Raises BadRequest for text that isn't valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadRequest(f"The text has a lone surrogate at character {e.start}: send valid Unicode.") from None
        parts = self._control.split(text) if special else [text] if text else []
        if guard is not None:
            parts = [p if isinstance(p, int) else p.replace(guard, "") for p in parts]
        out: list[int] = []
        for part in parts:
            if isinstance(part, int):
                out.append(part)
                continue
            for piece in self._user.split(part):
                out += [piece] if isinstance(piece, int) else self._plain(piece, not out)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and out[:1] != [self.bos]:
            if self.bos is None:
                raise BadRequest("This model has no beginning-of-text token: leave add_bos out.")
            out.insert(0, self.bos)
        return out

    def _plain(self, text: str, start: bool) -> list[int]:
        ids = self.vocab.encode(text, start)
        if not self._forbidden.isdisjoint(ids):
            name = self.decode([next(i for i in ids if i in self._forbidden)], special=True)
            raise BadRequest(f"This model's vocabulary can't spell {name!r} as ordinary text: leave it out.")
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; a control token's name. Ids beyond the vocabulary (padding) have none."""
        known = self._bytes.get(token)
        if known is None:
            if not 0 <= token < self._rows:
                raise BadRequest(f"Token {token} is outside the vocabulary of {self._rows:,}.")
            known = self._bytes[token] = self.vocab.piece(token) if token < self.size else b""
        return known

    def is_control(self, token: int) -> bool:
        """Whether a token is markup that decoding leaves out."""
        return token in self._control_ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of whole ``ids``: a SentencePiece text loses its unwritten first space. Bad UTF-8 becomes U+FFFD.

        ``special``: write control tokens by name instead of leaving them out.
        """
        from headrace.text.stream import Stream

        stream = Stream(self, special=special, start=True)
        return "".join([*map(stream.push, ids), stream.flush()])
