"""The lab of container starts."""

from tests.support.labs.containers import lab

__all__ = ["lab"]
