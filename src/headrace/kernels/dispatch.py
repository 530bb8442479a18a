"""The choice of a device, made once."""

from __future__ import annotations

from headrace import config
from headrace.errors import Unsupported
from headrace.kernels.cpu import CpuDevice

CPU_VARIABLE = "HEADRACE_CPU"


def make_device(name: str = "cpu", *, threads: int, cpu: str | None = None) -> CpuDevice:
    """The device called ``name``. cpu: "portable" or "avx2" forces a path; None: what HEADRACE_CPU says, else the best.

    Raises Unsupported for an unknown device, or a path that is unknown or beyond this CPU.
    """
    if name != "cpu":
        raise Unsupported(f"There is no device {name!r}; there is: cpu.")
    if threads < 1:
        raise Unsupported(f"{threads} threads can't compute anything; ask for 1 or more.")
    path = config.resolve().cpu or "" if cpu is None else cpu
    try:
        return CpuDevice(threads, path)
    except ValueError as error:
        raise Unsupported(f"No such CPU path: {error}. Unset {CPU_VARIABLE} to use the best.") from None
