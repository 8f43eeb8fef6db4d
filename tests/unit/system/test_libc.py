"""Calls of the C library: their errors, and when it is loaded."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

import pytest

from bootseer.system.libc import last_error, libc, system_call

GETPID = {"x86_64": 39, "aarch64": 172, "riscv64": 172, "ppc64le": 20, "s390x": 20}


def test_the_last_error_is_that_of_the_call_and_names_the_file() -> None:
    assert libc().chdir(b"/nowhere at all") == -1
    error = last_error("/nowhere at all")
    assert (type(error), error.errno) == (FileNotFoundError, errno.ENOENT)
    assert error.filename == "/nowhere at all"
    assert last_error().filename is None


def test_there_is_one_library_and_functions_of_ones_own() -> None:
    assert libc() is libc()
    own = libc()["mincore"]
    own.argtypes = (ctypes.c_void_p,)
    assert libc()["mincore"].argtypes is None


def test_a_system_call_by_its_number() -> None:
    number = GETPID.get(os.uname().machine)
    if number is None:
        pytest.skip("this architecture's numbers are not known here")
    assert system_call(number) == os.getpid()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        system_call(100_000)


def test_importing_it_does_not_load_ctypes() -> None:
    modules = "child_processes", "libc", "mount_calls"
    code = f"import sys; from bootseer.system import {', '.join(modules)}; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit('ctypes' in sys.modules)"], check=False
    )
    assert done.returncode == 0
