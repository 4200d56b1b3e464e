"""The command line: ``fxmem``, and ``python -m fxmem``."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from fxmem.cli.options import (
    FORMATS,
    OF_MEMORY,
    OF_MODEL,
    OF_OUTPUT,
    OF_PLANNING,
    OF_STEP,
    add_options,
    add_output,
    given,
)

EPILOG = """\
models    package.module:factory  path/model.py:Net  torchvision:resnet50
          timm:convnext_tiny  hf:gpt2  hf:path/to/config.json
examples  fxmem estimate torchvision:resnet50 --input 32x3x224x224
          fxmem plan hf:gpt2 --batch 8 --device a100-40gb --budget 8GB
          fxmem estimate model.py:Net --arg width=64 --input 8x3x64x64
Every option has a default in the environment: FXMEM_DEVICE, FXMEM_BUDGET, ...
exit      0 it fits  1 it does not  2 wrong usage  3 it cannot be captured
"""
HELP = {
    "estimate": "the peak of a training step, what holds it, and whether it fits",
    "plan": "the cheapest plan that keeps a budget",
    "frontier": "what every budget costs",
    "advise": "what each habit that saves memory brings, and the least that suffices",
    "report": "what each module holds: parameters, gradients, state, saved, recomputed",
    "watch": "what a training script takes while it runs",
    "devices": "the GPUs that are known by name",
}
USAGE = {"devices": "[options]", "watch": "[options] SCRIPT [ARGS ...]"}
"""Of commands that are not about a model."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=80)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "fxmem",
        description="How much memory training a model takes, exactly, before it runs.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, text in HELP.items():
        usage = f"fxmem {name} {USAGE.get(name, 'MODEL [options]')}"
        command = commands.add_parser(name, usage=usage, help=text, description=f"Tell {text}.", formatter_class=_Help)
        if name not in USAGE:
            command.add_argument("model", metavar="MODEL", help="such as torchvision:resnet50 (see fxmem --help)")
            add_options(command, "model", OF_MODEL)
            add_options(command, "step", OF_STEP)
            add_options(command, "memory", OF_MEMORY)
            add_options(command, "planning", OF_PLANNING)
        if name == "watch":
            command.add_argument("script", metavar="SCRIPT", help="a training script in Python")
            command.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
            add_options(command, "memory", OF_MEMORY[2:])
            command.add_argument("--log", metavar="FILE", help="one line of JSON for each step")
        add_output(command)
        if name == "estimate":
            command.add_argument("--floor", action="store_true", help="plan, and tell the least reachable peak too")
            command.add_argument("--max-batch", action="store_true", help="find the largest batch that fits, too")
        if name == "report":
            command.add_argument("--depth", metavar="N", type=int, help="parts of a module path to tell apart")
        if name in ("plan", "report", "advise"):
            command.add_argument("--html", metavar="FILE", help="write a page for a browser, too; it loads nothing")
        if name == "frontier":
            command.add_argument("--points", metavar="N", type=int, default=16, help="as many are shown, 0: all (16)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status of the process."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        from fxmem import __version__

        print(f"fxmem {__version__}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 0
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    with nullcontext() if arguments.command == "watch" else _little_collected():  # a script's garbage is its own
        return _answered(arguments)


@contextmanager
def _little_collected() -> Iterator[None]:
    """Look for garbage seldom in the body: libraries make a million objects that stay, and looking through them again and
    again is a tenth of the time of an estimate."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _answered(arguments: argparse.Namespace) -> int:
    from fxmem.cli.commands import COMMANDS
    from fxmem.cli.output import NOT_CAPTURED, USAGE, shown
    from fxmem.errors import CaptureError, InputError, ProfileError

    style = str(given(OF_OUTPUT[0], arguments).value)
    try:
        if style not in FORMATS:
            raise InputError(f"no format is called {style!r}; known are {', '.join(FORMATS)}")
        answer = COMMANDS[arguments.command](arguments)
    except (CaptureError, ProfileError) as error:
        print(f"fxmem: {error}", file=sys.stderr)
        return NOT_CAPTURED
    except InputError as error:
        print(f"fxmem: {error}", file=sys.stderr)
        return USAGE
    print(shown(answer, style, arguments.quiet, arguments.no_color))
    return answer.status
