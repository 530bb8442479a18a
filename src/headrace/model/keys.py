"""Reading config.json and GGUF metadata: typed, bounded, and every key accounted for.

What is read is remembered, so that afterwards ``Keys.leftovers`` can refuse what nobody understood: a setting we
don't know may change the mathematics, and a wrong answer is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from headrace.errors import BadFile, Unsupported

MISSING: Any = object()
"""As a default: the key must be there."""

# Bookkeeping, training and generation settings of config.json; none changes a logit.
HARMLESS = """*_pdrop *_token_id *_token_index *dropout* _* architectures attn_implementation auto_map bos_token
    cache_implementation chunk_size_feed_forward do_sample dtype eos_token finetuning_task gradient_checkpointing
    id2label image_seq_length init_std initializer_* is_decoder is_llama_config label2id layerdrop license
    max_length max_sequence_length min_length mm_tokens_per_image model_max_length model_name model_type
    name_or_path num_beams num_labels output_attentions output_hidden_states output_projection pad_token prefix
    pretraining_tp problem_type return_dict task_specific_params temperature tokenizer_* top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_* use_cache use_flash_*
    use_return_dict vision_config""".split()  # noqa: SIM905
"""Keys (patterns) of config.json that may have any value."""


class Keys:
    """A mapping of untrusted values. ``where`` names the file in errors; None counts as absent."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Is the key present and not null? Doesn't count as reading it."""
        return self._data.get(key) is not None

    def null(self, key: str) -> bool:
        """Is the key there and null?"""
        return key in self._data and self._data[key] is None

    def raw(self, key: str, default: Any = MISSING) -> Any:
        self._read.add(key)
        value = self._data.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise BadFile(f"{self._where} lacks {key!r}; the model needs it.")
        return default

    def integer(self, key: str, default: int = MISSING, low: int = 0, high: int = 1 << 40) -> int:
        value = self.raw(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float = MISSING) -> float:
        value = self.raw(key, default)
        # An int may be too large for a float: compare first.
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
            raise self.bad(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool = MISSING) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str = MISSING) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "text")
        return value

    def each(self, key: str, count: int, default: int = MISSING, low: int = 1, high: int = 1 << 30) -> list[int]:
        """A whole number for all ``count`` blocks, or a list with one for each."""
        value = self.raw(key, default)
        if isinstance(value, np.ndarray):
            value = value[: count + 1].tolist()
        if not isinstance(value, list | tuple):
            return [self.integer(key, default, low, high)] * count
        one = [v for v in value if isinstance(v, int) and not isinstance(v, bool) and low <= v <= high]
        if len(value) != count or len(one) != count:
            raise self.bad(key, value, f"{count} whole numbers from {low} to {high}")
        return one

    def must(self, key: str, allowed: Iterable[Any]) -> None:
        """Refuse the key unless it's absent or has one of these values."""
        value = self.raw(key, None)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refuse(key)

    def bad(self, key: str, value: object, expected: str) -> BadFile:
        return BadFile(f"{self._where} sets {key!r} to {short(value)}, expected {expected}.")

    def refuse(self, key: str) -> Unsupported:
        """The error for a key whose value we know and can't do."""
        return Unsupported(f"{self._where} sets {key!r} to {short(self._data.get(key))}, which Headrace can't compute.")

    def leftovers(self, harmless: Iterable[str] = HARMLESS, only: str = "") -> None:
        """Refuse keys nobody read, except harmless ones and those that are off (null, false, 0, empty)."""
        patterns = tuple(harmless)
        for key, value in self._data.items():
            if key in self._read or not key.startswith(only) or off(value):
                continue
            if not any(fnmatchcase(key, p) for p in patterns):
                raise Unsupported(
                    f"{self._where} sets {key!r} to {short(value)}, which Headrace doesn't know and won't ignore; "
                    "if it doesn't change what the model computes, remove it there."
                )


def off(value: object) -> bool:
    """Does a value switch nothing on?"""
    if isinstance(value, bool | int | float):
        return value == 0
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def short(value: object) -> str:
    """A value for an error message, cut to a readable length."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a huge number"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value[:8] if isinstance(value, str | list | tuple) and len(value) > 200 else value)
    return text if len(text) <= 80 else text[:77] + "..."
