"""A process that yields the processor, with its privilege and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
