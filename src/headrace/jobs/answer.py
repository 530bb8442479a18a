"""A result line of the OpenAI batch file format, for a row that was computed or one that failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from headrace.engine import Job
from headrace.jobs.asked import CHAT, Asked
from headrace.run.types import Emit
from headrace.text.tokenizer import Tokenizer

REASONS = {"end": "stop", "stop": "stop", "length": "length"}


def row_id(job_key: str, line: int) -> str:
    """The same row of the same job always has the same id."""
    return "batch_req_" + hashlib.sha256(f"{job_key}\0{line}".encode()).hexdigest()[:24]


def failed(job_key: str, line: int, custom_id: str | None, code: str, message: str) -> str:
    """A row that can't be honoured, in a sentence."""
    return _dump(
        {
            "id": row_id(job_key, line),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


def answered(
    job_key: str, line: int, asked: Asked, jobs: Sequence[Job], tokenizer: Tokenizer, model: str, created: int
) -> str:
    """A row that was computed; ``jobs``: one per choice."""
    number = row_id(job_key, line)
    chat = asked.url == CHAT
    prompt = jobs[0].figures.prompt_tokens
    completion = sum(len(job.tokens) for job in jobs)
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + number[-24:],
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(chat, i, job, tokenizer) for i, job in enumerate(jobs)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
    response = {"status_code": 200, "request_id": number, "body": body}
    return _dump({"id": number, "custom_id": asked.custom_id, "response": response, "error": None})


def _choice(chat: bool, index: int, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    text = "".join(job.text)
    shared = {"index": index, "finish_reason": REASONS[job.finish]}
    if chat:
        content = [_chat_token(c, tokenizer) for c in job.choices] if job.choices else None
        logprobs = {"content": content, "refusal": None} if content is not None else None
        return {**shared, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
    return {**shared, "text": text, "logprobs": _text_tokens(job.choices, tokenizer) if job.choices else None}


def _named(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _chat_token(choice: Emit, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_named(token, logprob, tokenizer) for token, logprob in choice.top]
    return {**_named(choice.token, choice.logprob, tokenizer), "top_logprobs": top}


def _text_tokens(choices: Sequence[Emit], tokenizer: Tokenizer) -> dict[str, Any]:
    """The older shape: parallel lists."""
    tokens = [tokenizer.token_bytes(c.token).decode("utf-8", "replace") for c in choices]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    top = [{tokenizer.token_bytes(t).decode("utf-8", "replace"): p for t, p in c.top} for c in choices]
    return {
        "tokens": tokens,
        "token_logprobs": [c.logprob for c in choices],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
