"""One file over HTTP: resumed where it stopped, also by a later process, and checked before it gets its name.

Standard library only. (The hub's own Python client, from version 1 on, starts again from nothing after a process
ends, because it gives each download a new temporary name; resuming was the reason to write this.)
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from headrace.errors import BadFile, HeadraceError, Unavailable
from headrace.formats.files import sync_folder
from headrace.store.cache import PART

CHUNK = 1 << 20
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as dead."""
TRIES = 5
"""Connections that may fail in a row without bringing a byte."""
NETWORK = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError)
"""What a bad line raises; any other OSError is the disk's."""
Progress = Callable[[str, int, int], None]
"""Told (file, bytes so far, bytes in all) now and then."""


@dataclass(frozen=True)
class Remote:
    """A file to fetch. digest: (kind, hex): "sha256" of its bytes, or "git" (SHA-1 of git's blob), or none known."""

    name: str
    url: str
    nbytes: int
    digest: tuple[str, str] | None


def fetch(remote: Remote, target: Path, headers: Mapping[str, str], progress: Progress, pause: float = 1.0) -> None:
    """Bring ``remote`` to ``target``. What has come stays in ``target.part`` for the next try, unless it is wrong.

    ``pause``: seconds before a second connection; it doubles with each that fails.
    """
    part = target.with_name(target.name + PART)
    if part.exists() and part.stat().st_size > remote.nbytes:
        part.unlink()
    failures = 0
    with part.open("ab") as out:
        while out.tell() < remote.nbytes:
            before = out.tell()
            try:
                _receive(remote, out, headers, progress)
                trouble = "the connection ended early"
            except NETWORK as error:
                trouble = _trouble(remote, error)
            out.flush()
            failures = 0 if out.tell() > before else failures + 1
            if failures >= TRIES:
                raise Unavailable(f"{remote.name}: {trouble}; the same command goes on where it stopped.")
            if failures:
                time.sleep(pause * 2 ** (failures - 1))
    _check(remote, part)
    part.replace(target)
    sync_folder(target.parent)


def matches(remote: Remote, path: Path) -> bool:
    """Whether the file at ``path`` is the remote one, by size and hash."""
    if path.stat().st_size != remote.nbytes:
        return False
    if remote.digest is None:
        return True
    kind, expected = remote.digest
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % remote.nbytes)
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest() == expected


def _check(remote: Remote, part: Path) -> None:
    if not matches(remote, part):
        part.unlink()
        raise BadFile(
            f"{remote.name}: what came doesn't have the size and hash that the hub states; it was not kept. "
            "Try again, and don't trust the source if it stays so."
        )


def _receive(remote: Remote, out: BinaryIO, headers: Mapping[str, str], progress: Progress) -> None:
    """Append what one connection brings."""
    start = out.tell()
    wanted = {**headers, "Range": f"bytes={start}-"} if start else headers
    with request(remote.url, wanted) as response:
        if start and not (
            response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        ):
            out.truncate(0)  # the server can't resume: from the beginning
            out.seek(0)
        done = out.tell()
        while piece := response.read1(min(CHUNK, remote.nbytes + 1 - done)):
            out.write(piece)
            done += len(piece)
            if done > remote.nbytes:
                return
            progress(remote.name, done, remote.nbytes)


def request(url: str, headers: Mapping[str, str]) -> Any:
    """GET. ``headers`` go to the host named and no further: a redirect to a file store mustn't carry the token."""
    asked = urllib.request.Request(url)
    for name, value in headers.items():
        if name == "Authorization":
            asked.add_unredirected_header(name, value)
        else:
            asked.add_header(name, value)
    return urllib.request.urlopen(asked, timeout=TIMEOUT)


def _trouble(remote: Remote, error: Exception) -> str:
    """A sentence's end about a failure that may pass; raises for one that won't."""
    if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 416, 429):
        raise refused(remote.url, error)
    reason = getattr(error, "reason", None) or error
    return f"{urlsplit(remote.url).netloc} can't be reached or broke off ({str(reason).rstrip('.')})"


def refused(url: str, error: urllib.error.HTTPError) -> HeadraceError:
    """An HTTP status as our error."""
    host = urlsplit(url).netloc
    if error.code in (401, 403):
        return Unavailable(
            f"{host} refuses access ({error.code}): no such model, or it is private or gated. Accept its terms on its "
            "page and set HF_TOKEN to an access token."
        )
    if error.code == 404:
        return Unavailable(f"{host} has no {urlsplit(url).path}; check the model's name.")
    return Unavailable(f"{host} answered {error.code} {error.reason} for {urlsplit(url).path}; try again later.")
