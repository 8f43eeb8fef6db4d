"""Waiting for descriptors, whatever their numbers."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from bootseer.system.readiness import readable

HIGH = 1500  # select(2) knows none from 1,024 on


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose reading end has a high number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= HIGH:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * HIGH), hard))
    low, write = os.pipe()
    read = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(low)
    yield read, write
    os.close(read)
    os.close(write)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_high_descriptor_is_waited_for(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert read >= HIGH
    assert readable(read, timeout_s=0.0) == set()
    assert readable(read, timeout_s=0.01) == set()
    assert readable(read, timeout_s=-5.0) == set()
    os.write(write, b"x")
    assert readable(read) == {read}


def test_those_that_are_ready_are_told_apart(pipe: tuple[int, int]) -> None:
    read, _ = pipe
    child = os.fork()
    if child == 0:
        os._exit(0)
    process = os.pidfd_open(child)
    try:
        assert readable(read, process) == {process}
    finally:
        os.close(process)
        os.waitpid(child, 0)
