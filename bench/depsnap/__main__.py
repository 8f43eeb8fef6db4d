"""Measure some cases of bench `depsnap`: `python -m bench.depsnap CASE…`."""

from __future__ import annotations

from bench import memory
from bench.depsnap.benchmark import main

if __name__ == "__main__":
    with memory.kept():
        raise SystemExit(main())
