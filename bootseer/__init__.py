"""Measure and shorten the start of large training jobs.

Importing this package imports nothing else of it: job scripts pay for what they use.
"""

__all__ = ["__version__", "event", "phase"]

__version__ = "0.1.0"


def __getattr__(name):  # type: ignore[no-untyped-def]
    if name in ("event", "phase"):
        from bootseer import events

        return getattr(events, name)
    raise AttributeError(f"module 'bootseer' has no attribute {name!r}")
