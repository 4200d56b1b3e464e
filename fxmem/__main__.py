"""The command line: `python -m fxmem`, installed as `fxmem`."""

from fxmem.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
