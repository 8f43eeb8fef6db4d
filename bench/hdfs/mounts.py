"""Files of HDFS as mounts show them to programs: ours and rclone's, each mounted afresh."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.hdfs.lab import GIB, ROOT, Content, Lab, Run, checked, measured, run_of, side_command

Reader = Callable[[Path, Content], Run]
"""Reads a file to its end."""


def by_python(kind: str) -> Reader:
    """A kind of `bench.hdfs.side`, which compares the bytes."""

    def read(path: Path, content: Content) -> Run:
        told = checked(measured(side_command(kind, path)), content)
        return run_of(content, told["seconds"], told["cpu_s"])

    return read


def by_dd(path: Path, content: Content) -> Run:
    done = measured(["dd", f"if={path}", "of=/dev/null", "bs=1M"])
    if f"\n{content.size_bytes} bytes" not in done.errors:
        raise RuntimeError(f"dd read another size: {done.errors}")
    return run_of(content, done.seconds, done.cpu_s)


def by_cat(path: Path, content: Content) -> Run:
    if path.stat().st_size != content.size_bytes:
        raise RuntimeError(f"{path} has another size")
    done = measured(["sh", "-c", 'exec cat "$1" >/dev/null', "sh", str(path)])
    return run_of(content, done.seconds, done.cpu_s)


def our_mount(lab: Lab, url: str, name: str, reader: Reader) -> Run:
    """The file `name` of the folder `url` through `stripe mount`."""
    command = [sys.executable, "-m", "bootseer", "stripe", "mount", "--foreground", url]
    return _read(lab, command, name, reader)


def rclone_mount(lab: Lab, name: str, reader: Reader) -> Run:
    """The same through rclone's mount of its hdfs backend."""
    remote = f":hdfs,namenode='{lab.rpc}',username=root:/bench"
    return _read(lab, ["rclone", "mount", "--read-only", "--config", "", remote], name, reader)


def _read(lab: Lab, command: Sequence[str], name: str, reader: Reader) -> Run:
    content = lab.stored[name]
    with mounted(lab, command) as (process, folder):
        run = reader(folder / name, content)
        server_s, peak_mib = of_tree(process.pid)
    cpu_s_gib = run.cpu_s_gib + server_s * GIB / content.size_bytes
    return replace(run, cpu_s_gib=cpu_s_gib, peak_mib=peak_mib)


def of_tree(pid: int) -> tuple[float, float]:
    """Processor seconds and peak MiB of a process and its children, while they run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = sum(int(f) for f in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    peak_mib = int(found.group(1)) / 1024 if found else 0.0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        more_s, more_mib = of_tree(int(child))
        cpu_s, peak_mib = cpu_s + more_s, peak_mib + more_mib
    return cpu_s, peak_mib


@contextlib.contextmanager
def mounted(lab: Lab, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A fresh mount by a program that stays in the foreground."""
    folder = Path(tempfile.mkdtemp(prefix="mount-", dir=lab.scratch))
    log = (lab.scratch / "mount.log").open("wb")
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", "--", *command, str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        end = time.monotonic() + 30
        while folder.stat().st_dev == lab.scratch.stat().st_dev:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not mount")
            time.sleep(0.02)
        yield process, folder
    except RuntimeError as error:
        said = Path(log.name).read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{error}\n{command[0]} said: {said}") from error
    finally:
        subprocess.run(["umount", "-l", folder], check=False, stderr=subprocess.DEVNULL)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        log.close()
