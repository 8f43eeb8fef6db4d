"""How many descriptors this process may have, and which of them the node cache leaves to others.

A reader that cannot open a socket or a store's file for lack of a descriptor cannot read at all;
without one for the cache, it reads past the cache. So the cache stops early.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

_LEFT = 4
"""The part of all descriptors that is left to others: a quarter."""


def raise_limit() -> None:
    """Allow this process, and what it starts, as many as the machine allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_spare(descriptor: int) -> None:
    """Raise OSError(EMFILE) when one that was just opened is among those left to others.

    The kernel gives the lowest free number, so the number tells how many there are.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and descriptor >= most - most // _LEFT:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
