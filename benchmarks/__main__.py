"""``python -m benchmarks``: the comparison with peers; the other benchmarks are modules beside it."""

from benchmarks.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
