"""Measure some cases of bench `hdfs`: `python -m bench.hdfs CASE…`."""

from __future__ import annotations

from bench import memory
from bench.hdfs.benchmark import main

if __name__ == "__main__":
    with memory.kept():
        raise SystemExit(main())
