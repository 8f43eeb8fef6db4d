"""Processes in PID and mount namespaces of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_OWN_NAMESPACE = """
import os, subprocess, time
from bootseer.system.processes import mount_namespace, mount_namespace_has_ended, pid_namespace
own = pid_namespace()
with subprocess.Popen(["unshare", "--mount", "sleep", "600"]) as child:
    while (number := mount_namespace(child.pid)) == mount_namespace():
        time.sleep(0.01)
    told = [mount_namespace_has_ended(number, own)]
    child.kill()
told += [mount_namespace_has_ended(number, own), mount_namespace_has_ended(number, own + 1)]
os.setuid(65534)
print(*told, mount_namespace_has_ended(number, own))
"""


@pytest.mark.root
def test_a_mount_namespace_has_ended_with_its_processes() -> None:
    """As far as that can be told: by root, in the PID namespace that it was made in."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IN_OWN_NAMESPACE]
    done = subprocess.run(apart, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "False", "False"]
