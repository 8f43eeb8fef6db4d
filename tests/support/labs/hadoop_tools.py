"""What no client of ours can do or see: Hadoop's own tools, and a hung server's sockets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tools.hdfs import class_archive
from tools.hdfs.cluster import ADMIN
from tools.hdfs.jars import classpath
from tools.hdfs.process import COMMON, QUICK_START


def dfsadmin(hdfs: Any, *words: str) -> str:
    """Run `hdfs dfsadmin`; only for what harms no other test."""
    quick = (*COMMON, *QUICK_START, *class_archive.options())
    command = ["java", *quick, "-cp", f"{classpath()}:{hdfs.conf}", ADMIN]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unread_bytes(cluster: Any, number: int) -> int:
    """What was sent to a DataNode that stands still: the kernel keeps it for the process."""
    ports = cluster.datanode_ports[number]
    own = {ports.http, ports.data}
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    rows = [line.split() for line in lines]
    listening = "0A"  # its queue counts connections
    return sum(
        int(row[4].partition(":")[2], 16)
        for row in rows
        if int(row[1].partition(":")[2], 16) in own and row[3] != listening
    )
