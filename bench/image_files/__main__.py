"""Measure some cases of bench `image_files`: `python -m bench.image_files CASE…`."""

from __future__ import annotations

from bench import memory
from bench.image_files.benchmark import main

if __name__ == "__main__":
    with memory.kept():
        raise SystemExit(main())
