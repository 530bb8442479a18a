"""What ``headrace check --hosts`` runs on each host over ssh, ``python -m headrace.cluster.look WHAT``; answers JSON.

    facts MODEL FILE    versions, cores, memory, the model's digest; whether FILE, written elsewhere, is seen here
    write FILE, remove FILE
    listen              the other end of ``link``: prints its port, then answers one caller
    link ADDRESS PORT   round trip and rate to a listener
    cores               the CPUs that a rank started here may use

Sockets of its own and a second of sending, so that a link is measured before MPI has to work over it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace import __version__, system
from headrace.errors import HeadraceError

PATIENCE = 20.0
"""Seconds that one end waits for the other."""
SENDING = 0.5
"""Seconds of sending, and bytes at most, in a measurement of the rate."""
MOST = 256 << 20
ROUNDS = 20
PIECE = bytes(1 << 16)


def facts(model: str, seen: str) -> dict[str, Any]:
    now = system.memory()
    return {
        "time": time.time(),
        "version": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "mpi": _mpi(),
        "cores": system.cores(),
        "threads": system.threads(),
        "memory": {"total": now.total, "usable": now.usable},
        "model": _model(Path(model)) if model else None,
        "seen": bool(seen) and os.path.exists(seen),  # noqa: PTH110  (Path's raises where it may not look)
    }


def _mpi() -> dict[str, Any]:
    """The module's version and the library's, which need not be started for that."""
    if importlib.util.find_spec("mpi4py") is None:
        return {"error": "mpi4py isn't installed"}
    try:
        from mpi4py import rc

        rc.initialize = rc.finalize = False
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    except Exception as error:  # a library that can't be loaded is an ImportError or a RuntimeError
        return {"error": " ".join(str(error).split())[:300]}
    return {"mpi4py": importlib.metadata.version("mpi4py"), "library": library}


def _model(path: Path) -> dict[str, Any]:
    from headrace.formats.index import open_model

    try:
        if not path.exists():
            return {"there": False}
        with open_model(path) as file:
            on = system.file_system(path.parent)
            return {"there": True, "digest": file.digest(), "nbytes": file.nbytes, "on": on}
    except (HeadraceError, OSError) as error:  # a folder above it may be another user's
        return {"there": True, "error": str(error)}


def listen() -> dict[str, Any]:
    """Echo single bytes; then swallow what comes until the caller is done, and say how much it was and how long."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        talk, _ = server.accept()
        with talk:
            talk.settimeout(PATIENCE)
            talk.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUNDS):
                talk.sendall(talk.recv(1))
            count, start, buffer = 0, time.monotonic(), bytearray(1 << 20)
            while got := talk.recv_into(buffer):
                count += got
            took = time.monotonic() - start
            with suppress(OSError):
                talk.sendall(json.dumps({"nbytes": count, "seconds": took}).encode())
    return {"nbytes": count, "seconds": took}


def link(address: str, port: str) -> dict[str, Any]:
    """-> round trip in seconds (the middle one) and bytes/s as the other end counts them; or why there is none."""
    try:
        with socket.create_connection((address, int(port)), timeout=PATIENCE) as talk:
            talk.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(ROUNDS):
                start = time.monotonic()
                talk.sendall(b"x")
                if not talk.recv(1):
                    return {"error": "the connection was closed"}
                trips.append(time.monotonic() - start)
            sent, end = 0, time.monotonic() + SENDING
            while sent < MOST and time.monotonic() < end:
                talk.sendall(PIECE)
                sent += len(PIECE)
            talk.shutdown(socket.SHUT_WR)
            said = b""
            while piece := talk.recv(1024):
                said += piece
            other = json.loads(said)
            return {"rtt_s": sorted(trips)[ROUNDS // 2], "bytes_per_s": other["nbytes"] / max(1e-9, other["seconds"])}
    except (OSError, ValueError) as error:
        return {"error": str(getattr(error, "strerror", None) or error or "no answer")}


def write(path: str) -> dict[str, Any]:
    try:
        Path(path).touch()
    except OSError as error:
        return {"error": error.strerror}
    return {"written": True}


def remove(path: str) -> dict[str, Any]:
    Path(path).unlink(missing_ok=True)
    return {}


def cores() -> dict[str, Any]:
    return {"host": socket.gethostname(), "cores": system.cores(), "threads": system.threads()}


ASKED: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts, "listen": listen, "link": link, "write": write, "remove": remove, "cores": cores,
}  # fmt: skip


def main() -> int:
    what, *rest = sys.argv[1:]
    print(json.dumps(ASKED[what](*rest)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
