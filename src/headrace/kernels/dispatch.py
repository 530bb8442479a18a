"""The choice of a device, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import config
from headrace.errors import Unsupported
from headrace.kernels.cpu import CpuDevice

if TYPE_CHECKING:
    from headrace.kernels.torch_device import TorchDevice

TORCH = ("torch:cpu", "cuda")
"""Devices in PyTorch; ``run/tiers.py`` puts layers on them."""


def make_device(name: str = "cpu", *, threads: int, cpu: str | None = None, batch: int = 0) -> CpuDevice:
    """The device called ``name``. batch: threads for more than one row, 0: the same.

    cpu: "portable", "avx2" or "avx512" forces a path; None: what HEADRACE_CPU says, else the best.

    Raises Unsupported for an unknown device, or a path that is unknown or beyond this CPU.
    """
    if name in TORCH:
        raise Unsupported(f"The device {name} can't be used here; use cpu.")
    if name != "cpu":
        raise Unsupported(f"There is no device {name!r}; there are: cpu, {', '.join(TORCH)}.")
    if threads < 1:
        raise Unsupported(f"{threads} threads can't compute anything; ask for 1 or more.")
    path = config.resolve().cpu or "" if cpu is None else cpu
    try:
        return CpuDevice(threads, path, batch)
    except ValueError as error:
        raise Unsupported(f"The CPU path asked for can't be used: {error}. Unset HEADRACE_CPU for the best.") from None


def make_torch(name: str, *, threads: int) -> TorchDevice:
    """The device in PyTorch called ``name``. Unsupported when PyTorch or the device isn't there."""
    try:
        from headrace.kernels.torch_device import TorchDevice
    except ImportError as error:
        what = f"The device {name} needs PyTorch, which can't be imported ({error})"
        raise Unsupported(f"{what}; 'pip install headrace[torch]' brings it, or use the device cpu.") from None
    return TorchDevice(name, threads)
