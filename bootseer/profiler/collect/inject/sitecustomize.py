"""Found first on PYTHONPATH where imports are to be timed; then gives way to the user's own.

Must never fail, print, or leave a trace in the job's `sys.path`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _start() -> None:
    """Install the hook; the event writer is loaded when there is something to write."""
    import os

    if os.environ.get("BOOTSEER_IMPORTS") != "1" or not os.environ.get("BOOTSEER_EVENTS"):
        return
    parent = os.path.abspath(__file__)
    for _ in range(5):
        parent = os.path.dirname(parent)

    def load(name: str) -> Any:
        sys.path.append(parent)  # at the end: nothing that lies there may hide the job's modules
        try:
            module = __import__(name)
        finally:
            sys.path.reverse()
            sys.path.remove(parent)  # the last one, which is ours
            sys.path.reverse()
        for part in name.split(".")[1:]:
            module = getattr(module, part)
        return module

    def open_writer() -> Any:
        return load("bootseer.events.writer").open_writer()

    load("bootseer.profiler.collect.import_hook").install(open_writer)


def _give_way() -> None:
    """Import the sitecustomize that would have been found without us; its errors are its own."""
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
    _start()
except Exception:  # fall-back border: the job runs, without its imports timed
    pass
_give_way()
