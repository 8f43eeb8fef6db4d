"""Looks into other processes, which the kernel may keep waiting."""

from __future__ import annotations

import os
import threading

import pytest

from bootseer.proc_files import call_within, read_proc


def test_a_file_under_proc_is_read_whole() -> None:
    assert read_proc(f"/proc/{os.getppid()}/stat").startswith(f"{os.getppid()} (".encode())


def test_a_process_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        read_proc("/proc/0/stat")


def test_a_look_that_the_kernel_keeps_waiting_ends() -> None:
    """An event stands for the kernel's lock."""
    let_go = threading.Event()
    looks: list[threading.Thread] = []

    def look() -> None:
        looks.append(threading.current_thread())
        let_go.wait()

    with pytest.raises(TimeoutError, match="did not answer"):
        call_within(0.05, look)
    assert looks[0].is_alive()
    let_go.set()
    looks[0].join()


def test_what_a_look_raises_reaches_its_caller() -> None:
    def look(number: int) -> int:
        return 1 // number

    assert call_within(1.0, look, 1) == 1
    with pytest.raises(ZeroDivisionError):
        call_within(1.0, look, 0)
