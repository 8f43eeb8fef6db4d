"""Found first on PYTHONPATH where imports are to be timed; then gives way to the user's own.

Must never fail, print, or leave a trace in the job's `sys.path`.
"""

import sys


def _start() -> None:
    """Install the hook, with bootseer importable for as long as its few modules load."""
    import os

    if os.environ.get("BOOTSEER_IMPORTS") != "1" or not os.environ.get("BOOTSEER_EVENTS"):
        return
    here = os.path.dirname(os.path.abspath(__file__))
    parent = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    sys.path.append(parent)  # at the end: no module of the job may be hidden by what lies there
    try:
        from bootseer.profiler import events, importhook

        importhook.install(events.open_writer)
    finally:
        sys.path.reverse()
        sys.path.remove(parent)  # the last one, which is ours
        sys.path.reverse()


def _give_way() -> None:
    """Import the sitecustomize that would have been found without us; its errors are its own."""
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
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
