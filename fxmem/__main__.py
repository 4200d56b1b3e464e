"""The command line: `python -m fxmem`, installed as `fxmem`."""

import argparse
from collections.abc import Sequence

from fxmem import __version__


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; a subcommand is a subparser with its function as the default of `run`."""
    parser = argparse.ArgumentParser(prog="fxmem", description="Train PyTorch models inside a memory budget.")
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    parser.set_defaults(run=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit status of the process."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
