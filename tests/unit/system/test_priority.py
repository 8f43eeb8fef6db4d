"""Priorities, as the kernel has them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

from bootseer.system import priority


def test_the_lowest_priority_is_taken_by_this_thread_and_those_it_starts() -> None:
    code = """
import os, threading
from bootseer.system.priority import go_idle
go_idle()
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start(); thread.join()
print(os.sched_getscheduler(0) == os.SCHED_IDLE, found == [os.SCHED_IDLE], flush=True)
os.system("ionice -p %d" % os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "idle"]


def test_the_disk_alone() -> None:
    code = """
import os
from bootseer.system.priority import use_idle_disk
before = os.sched_getscheduler(0)
use_idle_disk()
print(os.sched_getscheduler(0) == before, flush=True)
os.system("ionice -p %d" % os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "idle"]


def test_the_call_has_a_number_on_the_machines_that_clusters_have() -> None:
    """Publishing dependencies knew two of them, and took the disk from the job on all others."""
    numbers = priority._IOPRIO_SET
    machines = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")
    assert [numbers[one] for one in machines] == [251, 30, 30, 273, 282]
    assert os.uname().machine in numbers
