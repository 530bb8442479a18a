"""A hub that runs in this process, close enough to the real one that its own Python client can fetch from it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = 1000
"""Files of at least this size are stored in LFS, which gives them a SHA-256."""


@dataclass
class Hub:
    """The server's files and its faults, which tests set while it runs."""

    repo: str
    files: Mapping[str, bytes]
    url: str = ""
    store_url: str = ""
    """The same server by another name, as the real hub's files are on another host."""
    drop_after: list[int] = field(default_factory=list)
    """For each of the next downloads: bytes after which its connection breaks."""
    damage: bool = False
    ranges: bool = True
    token: str | None = None
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """(path, Range, Authorization) of every download from the file store."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        if path.startswith("/store/"):
            return self.store(path.removeprefix("/store/"))
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, b"{}")
        if path.startswith(f"/api/models/{hub.repo}"):
            return self.answer(200, json.dumps(self.listing()).encode())
        stem = f"/{hub.repo}/resolve/"
        name = path.removeprefix(stem).partition("/")[2]
        if not path.startswith(stem) or name not in hub.files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        data = hub.files[name]
        linked = {"X-Repo-Commit": COMMIT, "ETag": f'"{blob_id(data)}"', "Location": f"{hub.store_url}/store/{name}"}
        if len(data) >= LFS:
            linked |= {"X-Linked-Etag": f'"{digest(data)}"', "X-Linked-Size": str(len(data))}
            return self.answer(302, b"", linked)
        return self.answer(200, data, linked)

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.hub.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob_id(data)}
            if len(data) >= LFS:
                entry["lfs"] = {"sha256": digest(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.hub.repo, "sha": COMMIT, "siblings": siblings}

    def store(self, name: str) -> None:
        hub, data = self.hub, self.hub.files[name]
        wanted = self.headers.get("Range")
        if self.command == "GET":
            hub.asked.append((name, wanted, self.headers.get("Authorization")))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and hub.ranges else 0
        part = data[start:]
        if hub.damage:
            part = bytes(b ^ 1 for b in part)
        self.send_response(206 if wanted and hub.ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{digest(data)}"')
        if wanted and hub.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            if hub.drop_after:
                self.wfile.write(part[: hub.drop_after.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(part)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(repo: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(repo, files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.store_url = hub.url.replace("127.0.0.1", "localhost")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
