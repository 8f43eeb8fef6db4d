"""The benchmarks' names, as `python -m bench NAME` has them, and the module of each."""

from __future__ import annotations

import importlib
import types

NAMES = (
    "wrapper",
    "events",
    "report",
    "depsnap",
    "plain",
    "fuse",
    "fetch",
    "hdfs",
    "k8s",
    "image",
    "image_files",
    "start",
)


def module_of(name: str) -> types.ModuleType:
    """The module of a benchmark: `bench/NAME.py`, or `bench/NAME/benchmark.py` if it has a folder.

    It has `run(options)`, or `measure(options, names, keep)` and `CASES` where single cases can be
    asked for; `MEASURES` names the paths that make its figures stale.
    """
    module = importlib.import_module(f"bench.{name}")
    if hasattr(module, "__path__"):
        return importlib.import_module(f"bench.{name}.benchmark")
    return module
