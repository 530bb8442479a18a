"""What the operating system says about this machine and process: cores, memory, limits.

What differs between Linux, macOS and Windows about the machine lives here; about files, in ``formats/files.py``.
Linux is complete; elsewhere a value that can't be had is None, and callers say "unknown".
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import Unsupported

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class Memory:
    """Bytes. limit: the tightest memory cgroup above this process (None: none); used: what that group holds now."""

    total: int | None
    available: int | None
    limit: int | None
    used: int | None

    @property
    def usable(self) -> int | None:
        """What this process may still take: free memory of the machine and of its cgroup."""
        room = [self.available] if self.available is not None else []
        if self.limit is not None:
            room.append(max(0, self.limit - (self.used or 0)))
        return min(room) if room else None


def threads() -> int:
    """Hardware threads this process may run on, an affinity mask and a cgroup's CPU quota taken into account."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, min(count, round(quota)) if quota else count)


def cores() -> int:
    """Physical cores under ``threads``: a second thread of a core adds next to nothing to a matrix product."""
    seen: set[str] = set()
    if sys.platform == "linux":
        for cpu in os.sched_getaffinity(0):
            seen.add(_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu))
    return max(1, min(len(seen), threads()) if seen else threads())


def load() -> float:
    """Programs that wanted to compute in the last minute, a core: over 1, they waited for each other. 0: not known."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def processor() -> str:
    """The processor's name, as it calls itself."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


FEATURES = ("avx", "f16c", "fma", "bmi2", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
            "amx_int8", "asimd", "asimddp", "i8mm", "sve")  # fmt: skip


def features() -> tuple[str, ...]:
    """Vector instruction sets that matter here, by the kernel's names (Linux only)."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    have = set(found[1].split()) if found else set()
    return tuple(f for f in FEATURES if f in have)


def memory() -> Memory:
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE))
    total = int(info["MemTotal"]) << 10 if "MemTotal" in info else _sysconf_memory()
    available = int(info["MemAvailable"]) << 10 if "MemAvailable" in info else None
    limit = used = None
    for folder, most, now in _memory_groups():
        value = _number(folder / most)
        if value is not None and value < min(UNLIMITED, limit or UNLIMITED):
            limit, used = value, _group_use(folder, now)
    return Memory(total, available, limit, used)


def peak_rss() -> int | None:
    """The most bytes this process has had in memory so far."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def fine_timer() -> None:
    """Let this thread's short sleeps end on time: Linux adds up to 50 us otherwise (man 2 PR_SET_TIMERSLACK)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1), 0, 0, 0)


def _sysconf_memory() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_paths(controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, cgroup version) from this process's group up to the root, for one controller."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            root, version = Path("/sys/fs/cgroup"), 2
        elif controller in names.split(","):
            root, version = Path("/sys/fs/cgroup") / names, 1
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path is the host's while the mount is the container's own: the root is looked at too.
        for folder in (group, *group.parents):
            yield folder, version
            if folder == root:
                break


def _memory_groups() -> Iterator[tuple[Path, str, str]]:
    for folder, version in _group_paths("memory"):
        if version == 2:
            yield folder, "memory.max", "memory.current"
        else:
            yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes"


def _group_use(folder: Path, now: str) -> int | None:
    """Bytes a group holds, without the page cache that it would give up at once."""
    used = _number(folder / now)
    # v1 has inactive_file of the group alone and total_inactive_file with its children: the larger is the latter.
    cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return used if used is None else max(0, used - max(map(int, cached), default=0))


def _cpu_quota() -> float | None:
    """CPUs a cgroup allows, the tightest of all levels."""
    found = []
    for folder, version in _group_paths("cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """Type of the file system a folder lies on ("ext4", "nfs4", ...); "" where the system doesn't tell."""
    mounts = _text(Path("/proc/self/mounts"))
    best, kind = -1, ""
    target = folder.resolve()
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # proc(5): blanks and backslashes in mount points are written in octal.
        point = Path(fields[1].encode().decode("unicode_escape"))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def interleave() -> None:
    """From now on this process's memory is spread page by page over all NUMA nodes it may use; on Linux only.

    Which thread computes which rows isn't fixed, so no node is the right one for any weight. Unsupported elsewhere.
    """
    calls = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        raise Unsupported("Memory can't be spread over NUMA nodes on this system; leave out --numa.")
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * 16)()
    allowed = 4  # MPOL_F_MEMS_ALLOWED; MPOL_INTERLEAVE is 3 (linux/mempolicy.h)
    got = libc.syscall(calls[1], None, mask, 1024, None, allowed)
    if got or libc.syscall(calls[0], 3, mask, 1024):
        raise Unsupported(
            f"The system doesn't let memory be spread ({os.strerror(ctypes.get_errno())}); leave out --numa."
        )
