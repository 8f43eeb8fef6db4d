"""Measure some cases of bench `image`: `python -m bench.image CASE…`."""

from __future__ import annotations

from bench import memory
from bench.image.benchmark import main

if __name__ == "__main__":
    with memory.kept():
        raise SystemExit(main())
