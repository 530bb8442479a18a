"""``headrace speculative``: ``run`` under the name and with the options of PipeInfer's program.

`headrace speculative` takes the command lines of PipeInfer's program `speculative`. Its README's example for four
nodes, three of them with the big model and one with the small:

```
mpirun -hostfile hosts --bind-to none headrace speculative -md tiny.gguf -m big.gguf -e -f prompt.txt -n 128 \\
  --mpi-layer-split 0.1,0.4,0.5/1.0 --ignore-eos --temp -1.0 --repeat-last-n 0 --draft 4 -tb 12,32,40,32 \\
  -t 6,32,20,32 -c 1024 -pa 0.001 -ps 0.8 --numa -pr 0.4 -pd 0.01 -np 3
```

What differs a little: `--numa` spreads what is loaded over the memory of all nodes (which thread computes which rows
isn't fixed, so no node is the right one for a weight); `--no-mmap` is always so; what a layer split leaves over goes to
rank 0, as its README says; a text may not outgrow its context; the text is the target's own at any temperature.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.cli import run as run_command
from headrace.cli.parser import BadUsage, whole

_ROPE = "the model file says how positions are scaled, and nothing else gives its text"
_CHAT = "use `headrace chat`"
_GPU = "this command computes on CPUs"
_LORA = "adapters can't be applied; merge it into the model file"
_GUIDE = "guidance and grammars aren't there"
_MIROSTAT = "the noise of a token must not depend on the tokens before it; use --top-p or --min-p"
_FILTER = "use --top-p or --min-p"
_OTHER = "that is for other programs of its family"
_CACHE = "prompts aren't kept on disk"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HONOURED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "as -n": (("--n-predict",), {"dest": "tokens", "type": whole(1)}),
    "as -c": (("--ctx-size",), {"dest": "context", "type": whole(2)}),
    "as --seed": (("-s",), {"dest": "seed", "type": whole(0, 2**64 - 1)}),
    "the prompt": (("-p", "--prompt"), {"dest": "prompt_option"}),
}
"""Flags of that program that have another name here."""
HERE = _words(
    "-h --help -m --model -md --model-draft -f --file -e --escape -t --threads -tb --threads-batch -n -c --seed --temp "
    "--top-k --top-p --min-p --repeat-last-n --repeat-penalty --ignore-eos --draft -np --parallel -pa --p-accept -ps "
    "--p-split -pr --p-recovery -pd --p-decay --mpi-layer-split --numa --no-mmap"
)
"""Flags of that program that `headrace run` has too, with the same meaning."""
REFUSED: dict[str, tuple[str, ...]] = {
    _CHAT: _words("-i --interactive --interactive-first -ins --instruct --multiline-input -r --reverse-prompt --color "
                 "--in-prefix-bos --in-prefix --in-suffix -cml --chatml"),
    _CACHE: ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"),
    "give a prompt": ("--random-prompt",),
    "a run has as many rows as it needs": ("-b", "--batch-size"),
    _FILTER: ("--tfs", "--typical"),
    "use --repeat-penalty, or a batch file": ("--presence-penalty", "--frequency-penalty"),
    _MIROSTAT: ("--mirostat", "--mirostat-lr", "--mirostat-ent"),
    "biases are for batch files": ("-l", "--logit-bias"),
    _GUIDE: ("--grammar", "--grammar-file", "--cfg-negative-prompt", "--cfg-negative-prompt-file", "--cfg-scale"),
    _ROPE: _words("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
                 "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast"),
    "every token is penalised alike": ("--no-penalize-nl",),
    "the cache has 16, 8 or 4 bits (--kv-bits)": ("--memory-f32",),
    _OTHER: _words("--logits-all --hellaswag --hellaswag-tasks --chunks -ns --sequences -cb --cont-batching --mmproj "
                  "--image -a --alias --embedding --perplexity --ppl-stride --ppl-output-type --infill"),
    "a text that outgrows its context ends there (-c)": ("--keep",),
    "memory isn't locked; --ram keeps it within what is there": ("--mlock",),
    _GPU: _words("-ngl --n-gpu-layers --gpu-layers -ngld --n-gpu-layers-draft --gpu-layers-draft -ts --tensor-split "
                "-mg --main-gpu -nommq --no-mul-mat-q"),
    "--json and stderr tell what is to be told": _words("--verbose-prompt -dkvc --dump-kv-cache --simple-io -ld "
                                                       "--logdir --log-test --log-disable --log-enable --log-file "
                                                       "--log-append"),
    _LORA: ("--lora", "--lora-scaled", "--lora-base"),
}  # fmt: skip
"""Why -> every other option of that program (its `common.cpp` of the time)."""


class Refuse(argparse.Action):
    """An option that is known and not offered: the reason is the error."""

    def __call__(self, parser: object, namespace: object, values: object, flag: str | None = None) -> NoReturn:
        why = next(why for why, flags in REFUSED.items() if flag in flags)
        raise BadUsage(f"{flag} isn't offered: {why} (docs/pipeinfer.md lists every option).")


def add(parser: argparse.ArgumentParser) -> None:
    run_command.add(parser)
    parser.description = (
        "`headrace run` for those who know PipeInfer's program: the same command lines, the prompt continued as it is. "
        "docs/pipeinfer.md lists what becomes of each of its options."
    )
    for flags, settings in HONOURED.values():
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings)
    for flags in REFUSED.values():
        parser.add_argument(*flags, action=Refuse, nargs="?", help=argparse.SUPPRESS)
    parser.set_defaults(raw=True)


def run(args: argparse.Namespace) -> int:
    given = getattr(args, "prompt_option", None)
    if given is not None:
        if args.prompt is not None:
            raise BadUsage("Two prompts are given; leave one out.")
        args.prompt = given
    return run_command.run(args)


def rows() -> Sequence[tuple[str, str]]:
    """(option, what becomes of it) of all of that program's options, for docs/pipeinfer.md."""
    found = [(flag, "the same") for flag in HERE]
    found += [(flag, what) for what, (flags, _) in HONOURED.items() for flag in flags]
    found += [(flag, f"refused: {why}") for why, flags in REFUSED.items() for flag in flags]
    return sorted(found, key=lambda row: row[0].lstrip("-").lower())
