"""Priorities, as the kernel has them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


_YIELD = """
import os, threading
from bootseer.system.priority import YieldingProcess
BECOME
def niceness(threads=2):
    while len(os.listdir("/proc/self/task")) > threads:
        pass  # one that ended is listed for a moment
    return {os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir("/proc/self/task")}
other = threading.Event()
threading.Thread(target=other.wait).start()
before, yielding = niceness(), YieldingProcess(10)
yielding.end()
assert niceness() == before
yielding.begin()
during = niceness()
late = threading.Thread(target=other.wait)
late.start()
began = niceness(3)
yielding.end()
after = niceness(3)
yielding.end()
other.set()
print(len(before), *({n - min(before) for n in one} for one in (before, during, began, after)))
"""


def yields(become: str) -> str:
    code = _YIELD.replace("BECOME", become)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.root
def test_a_process_yields_for_a_while_with_all_its_threads() -> None:
    assert yields("") == "1 {0} {10} {10} {0}"


def test_a_process_that_could_not_come_back_does_not_yield() -> None:
    become = (
        "import resource; resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n"
        "if os.geteuid() == 0: os.setuid(65534)"
    )
    assert yields(become) == "1 {0} {0} {0} {0}"
