"""Options for a device beside the CPU: which one, its memory, the link to it, and what may be approximated."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.parser import real, size
from headrace.errors import BadRequest

DEVICES = ("cpu", "torch:cpu", "cuda")


def add_device(group: argparse._ActionsContainer, default: str | None = "cpu") -> None:
    """Where layers are computed. default None: what there is."""
    add = group.add_argument
    device = (
        "cpu is the C++ code. cuda and torch:cpu are PyTorch's ('pip install headrace[torch]'), a model of "
        "their own with the host and the disk behind them; torch:cpu stands in for a GPU and is slow (default: "
        f"{default or 'cuda where there is a GPU, else torch:cpu where PyTorch is, else cpu'})"
    )
    add("--device", choices=DEVICES, default=default, help=device)
    ram = "the most of cuda's (or torch:cpu's) own memory to use; layers that don't fit cross from the host"
    add("--device-ram", type=size, metavar="SIZE", help=ram)
    link = "slow the link between host and device to RATE bytes a second each way, like 12G: to try torch:cpu as a GPU"
    add("--link", dest="link_rate", type=size, metavar="RATE", help=link)
    host = (
        "what computes layers placed at the host: torch:cpu (default: the device's formulas) or cpu (fast; other text)"
    )
    add("--host-device", choices=("torch:cpu", "cpu"), help=host)


def add_more(group: argparse._ActionsContainer) -> None:
    """Of the device's weights, and what is approximated."""
    add = group.add_argument
    pin = "with cuda: pin the host memory of weights, so that they cross without a copy on the way"
    add("--pin-weight", action="store_true", help=pin)
    sparsity = (
        "an approximation: attention takes only the fraction P of values that weigh most (at least 32). It is then "
        "another model, called NAME-sparseP (default 1: exact)"
    )
    add("--attn-sparsity", type=real(0, 1, above=True), default=1.0, metavar="P", help=sparsity)


def device_of(args: argparse.Namespace) -> dict[str, Any]:
    """What these options say, as fields of ``Options``. BadRequest for those that need another device."""
    from headrace.memory.link import Pace

    given = {"--device-ram": args.device_ram, "--link": args.link_rate, "--host-device": args.host_device}
    idle = [flag for flag, value in given.items() if value is not None]
    if args.device == "cpu" and idle:
        raise BadRequest(f"{idle[0]} is for a device with memory of its own; add --device cuda or torch:cpu.")
    if args.pin_weight and args.device != "cuda":
        raise BadRequest(f"--pin-weight is for cuda; with {args.device} there is nothing to pin, so leave it out.")
    return {
        "device": args.device,
        "device_ram": args.device_ram,
        "link": None if args.link_rate is None else Pace(float(args.link_rate)),
        "host_device": args.host_device or "torch:cpu",
        "pin_weight": args.pin_weight,
        "attn_sparsity": args.attn_sparsity,
    }
