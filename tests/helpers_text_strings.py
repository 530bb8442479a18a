"""Seeded random Unicode strings for comparing tokenizers: words, spaces, digits, punctuation and any code point."""

from __future__ import annotations

import random

_SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t"]
_SPACES += ["\u00a0", "\u2003", "\u3000", "\u200b", "\x85"]
# fmt: off
_WORDS = [
    "the", "of", "and", "Hello", "WORLD", "don't", "it's", "I'LL", "we've", "they'Re", "river",
    "naïve", "straße", "Ελλάδα", "Привет", "мир", "你好", "世界", "日本語", "テスト", "한국어", "مرحبا", "שלום",
    "हिन्दी", "ไทย", "éa", "ﬁ", "ＡＢ", "x²", "½", "Ⅷ", "٣٤", "12345", "3.14", "1,000", "0x1F", "<s>",
    "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<h1>", "<unk>", "<0x41>", "<start_of_turn>",
    "[multimodal]", "🙂", "👩‍👩‍👧", "🇳🇱", "▁", "▁▁", "Ġ", "Ċ", "a+b=c", "$x^2", "`code`", "~~~",
    "...", "---", "!=", "#tag", "@me", "snake_case", "camelCase",
]
# fmt: on
_RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)]
_RANGES += [(0x2000, 0x206F), (0x2070, 0x218F), (0x2190, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
_RANGES += [(0xE000, 0xF8FF), (0xFE00, 0xFFEF), (0x1F300, 0x1FAFF), (0x20000, 0x2FFFF)]


def random_text(r: random.Random) -> str:
    """One string of up to some 60 characters; a tenth of its characters are any code point but a surrogate."""
    parts: list[str] = []
    for _ in range(r.randrange(1, 16)):
        kind = r.random()
        if kind < 0.35:
            parts.append(r.choice(_WORDS))
        elif kind < 0.6:
            parts.append(r.choice(_SPACES))
        elif kind < 0.9:
            low, high = r.choice(_RANGES)
            parts.append("".join(chr(r.randint(low, high)) for _ in range(r.randrange(1, 5))))
        else:
            point = r.randrange(0x110000 - 0x800)
            parts.append(chr(point if point < 0xD800 else point + 0x800))
    return "".join(parts)
