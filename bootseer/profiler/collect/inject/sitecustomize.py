"""Installs the import hook in a job's Python process, then runs the user's own sitecustomize.

Python finds this module first, as its directory stands at the head of PYTHONPATH where imports are
to be timed. It must never fail, print, or leave a trace in the job's `sys.path`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _install_hook() -> None:
    """Install the hook; the event writer is loaded when there is something to write."""
    import os

    if os.environ.get("BOOTSEER_IMPORTS") != "1" or not os.environ.get("BOOTSEER_EVENTS"):
        return
    package_parent = os.path.abspath(__file__)
    for _ in range(5):
        package_parent = os.path.dirname(package_parent)

    def load_module(name: str) -> Any:
        sys.path.append(package_parent)  # last, so that it cannot hide the job's own modules
        try:
            module = __import__(name)
        finally:
            sys.path.reverse()
            sys.path.remove(package_parent)  # the last one, which is ours
            sys.path.reverse()
        for part in name.split(".")[1:]:
            module = getattr(module, part)
        return module

    def open_writer() -> Any:
        return load_module("bootseer.events.writer").open_writer()

    load_module("bootseer.profiler.collect.import_hook").install(open_writer)


def _import_next_sitecustomize() -> None:
    """Import the sitecustomize that Python would have found without this one.

    An error of its own is raised as without us.
    """
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


try:
    _install_hook()
except Exception:  # fall-back border: the job runs, without its imports timed
    pass
_import_next_sitecustomize()
