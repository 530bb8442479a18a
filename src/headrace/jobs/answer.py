"""A result line of the OpenAI batch file format, for a row that was computed or one that failed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from headrace.jobs.asked import CHAT, Asked
from headrace.results import Job
from headrace.run.types import Emit
from headrace.text.stream import Stream
from headrace.text.tokenizer import Tokenizer

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
"""Ends of a request that give an answer, and what the API calls them."""
NEVER = -9999.0
"""The API's log-probability of what can't be."""


def row_id(key: str, line: int) -> str:
    """The same row of the same job always has the same id."""
    return "batch_req_" + hashlib.sha256(f"{key}\0{line}".encode()).hexdigest()[:24]


def failed(key: str, line: int, custom_id: str | None, code: str, message: str) -> str:
    """A row that can't be honoured, in a sentence."""
    error = {"code": code, "message": message}
    return _dump({"id": row_id(key, line), "custom_id": custom_id, "response": None, "error": error})


def answered(
    key: str, line: int, asked: Asked, jobs: Sequence[Job], tokenizer: Tokenizer, model: str, created: int
) -> str:
    """A row that was computed; ``jobs``: one per choice. created: seconds since 1970, the same in the whole job."""
    number = row_id(key, line)
    chat = asked.url == CHAT
    name, kind = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")
    prompt, completion = jobs[0].figures.prompt_tokens, sum(len(job.tokens) for job in jobs)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    choices = [_choice(asked, i, job, tokenizer) for i, job in enumerate(jobs)]
    body = {"id": name + number[-24:], "object": kind, "created": created, "model": model, "choices": choices,
            "usage": usage}  # fmt: skip
    response = {"status_code": 200, "request_id": number, "body": body}
    return _dump({"id": number, "custom_id": asked.custom_id, "response": response, "error": None})


def _choice(asked: Asked, index: int, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    text = "".join(job.text)
    shared = {"index": index, "finish_reason": REASONS[job.finish]}
    wanted = asked.sampling.logprobs > 0
    if asked.url == CHAT:
        content = [_chat_token(c, tokenizer) for c in job.choices]
        logprobs = {"content": content, "refusal": None} if wanted else None
        return {**shared, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
    return {**shared, "text": text, "logprobs": _text_tokens(job.choices, tokenizer) if wanted else None}


def _named(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NEVER


def _chat_token(choice: Emit, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_named(token, logprob, tokenizer) for token, logprob in choice.top]
    return {**_named(choice.token, choice.logprob, tokenizer), "top_logprobs": top}


def _text_tokens(choices: Sequence[Emit], tokenizer: Tokenizer) -> dict[str, Any]:
    """The older shape: parallel lists. text_offset: characters of the answer before the token's first whole one."""
    stream = Stream(tokenizer)
    offsets, at = [], 0
    for choice in choices:
        offsets.append(at)
        at += len(stream.push(choice.token))
    return {
        "tokens": [_spelt(c.token, tokenizer) for c in choices],
        "token_logprobs": [_finite(c.logprob) for c in choices],
        "top_logprobs": [{_spelt(t, tokenizer): _finite(p) for t, p in c.top} for c in choices],
        "text_offset": offsets,
    }


def _spelt(token: int, tokenizer: Tokenizer) -> str:
    """A token's text; one that is a part of a character as the API writes it, ``bytes:\\xe2``."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _dump(value: object) -> str:
    """JSON in Unicode; an unpaired surrogate, which a row may quote, stays the escape it came as."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace").decode()
