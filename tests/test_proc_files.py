"""Looks into other processes, which the kernel may keep waiting."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bootseer.system.proc_files import call_within, read_proc


def test_a_file_under_proc_is_read_whole() -> None:
    assert read_proc(f"/proc/{os.getppid()}/stat").startswith(f"{os.getppid()} (".encode())


def test_a_process_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        read_proc("/proc/0/stat")


def test_a_look_that_the_kernel_keeps_waiting_ends() -> None:
    """An event stands for the kernel's lock."""
    let_go, ended = threading.Event(), threading.Event()
    held_back: list[set[int]] = []

    def look() -> None:
        held_back.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        let_go.wait()
        ended.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(TimeoutError, match="did not answer"):
        call_within(0.05, look)
    assert not ended.is_set()
    # A signal for the job that waits behind us must find no thread that takes it.
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= held_back[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    let_go.set()
    assert ended.wait(60)


def test_what_a_look_raises_reaches_its_caller() -> None:
    def look(number: int) -> int:
        return 1 // number

    assert call_within(1.0, look, 1) == 1
    with pytest.raises(ZeroDivisionError):
        call_within(1.0, look, 0)
