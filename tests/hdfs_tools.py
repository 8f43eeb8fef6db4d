"""Hadoop's own tools against the shared cluster, for what no client of ours can do."""

from __future__ import annotations

import subprocess
from typing import Any

from tools.hdfs.cluster import ADMIN
from tools.hdfs.jars import classpath
from tools.hdfs.process import COMMON, QUICK_START


def dfsadmin(hdfs: Any, *words: str) -> str:
    """Run `hdfs dfsadmin`; only for what harms no other test."""
    command = ["java", *COMMON, *QUICK_START, "-cp", f"{hdfs.conf}:{classpath()}", ADMIN]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
