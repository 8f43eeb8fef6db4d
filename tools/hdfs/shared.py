"""One cluster for every process of this user that wants it at the same time.

`attach` starts a keeper where none runs, and connects to it. The keeper holds the cluster while
anybody is connected: the kernel closes the connections of killed processes, and kills the
servers when the keeper is killed, so nothing is left behind in either case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.hdfs.cluster import Cluster

READY = b"ready"


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """Where a running cluster is. `datanode_pids` are for looking at: do not harm a shared one."""

    hdfs_url: str
    webhdfs_url: str
    http_addresses: list[str]
    rpc_addresses: list[str]
    datanode_http_addresses: list[str]
    datanode_pids: list[int]
    conf: str
    directory: str


def running(cluster: Cluster) -> Running:
    return Running(
        hdfs_url=cluster.hdfs_url,
        webhdfs_url=cluster.webhdfs_url,
        http_addresses=cluster.http_addresses,
        rpc_addresses=cluster.rpc_addresses,
        datanode_http_addresses=cluster.datanode_http_addresses,
        datanode_pids=[d.pid for d in cluster.datanodes],
        conf=str(cluster.conf),
        directory=str(cluster.directory),
    )


@contextlib.contextmanager
def attach() -> Iterator[Running]:
    """Use the shared cluster, started when nobody else has. Raises RuntimeError with its log."""
    place = _place()
    with _locked(place):
        connection = _connect(place) or _spawn(place)
        found = Running(**json.loads((place / "running.json").read_text(encoding="utf-8")))
    with connection:
        yield found


def _place() -> Path:
    """A folder of this user's own, named after the code: other code, another cluster."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / f"bootseer-hdfs-{os.getuid()}-{code.hexdigest()[:8]}"


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Make and lock the folder. A keeper that ends removes it, lock and all: then look again."""
    while True:
        place.mkdir(mode=0o700, exist_ok=True)
        try:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if os.fstat(folder).st_uid != os.getuid():
                raise RuntimeError(f"{place} belongs to somebody else; remove it")
            if os.fstat(folder).st_nlink:
                yield
                return
        finally:
            os.close(folder)


def _connect(place: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_name_of(place) as name:
            connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


@contextlib.contextmanager
def _short_name_of(place: Path) -> Iterator[str]:
    """A name of the socket in a folder that a socket's address has room for, of 108 bytes."""
    folder = os.open(place, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/socket"
    finally:
        os.close(folder)


def _spawn(place: Path) -> socket.socket:
    """Start a keeper that ends when the returned connection and all later ones are closed."""
    ours, its = socket.socketpair()
    with its, (place / "keeper.log").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tools.hdfs.shared", str(place), str(its.fileno())],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[its.fileno()],
            start_new_session=True,
        ).returncode = 0  # it outlives us by design; the interpreter need not complain
    if ours.recv(len(READY)) != READY:
        text = (place / "keeper.log").read_text(encoding="utf-8", errors="replace")
        ours.close()
        raise RuntimeError(f"the shared HDFS did not start:\n{text[-6000:]}")
    return ours


def keep(place: Path, first: socket.socket) -> None:
    """Run the cluster until nobody is connected any more."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _remove_leftovers(place)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=place))
    with (directory / "alive").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            with (
                Cluster(directory, permissions=True) as cluster,
                socket.socket(socket.AF_UNIX) as listener,
            ):
                (place / "socket").unlink(missing_ok=True)
                with _short_name_of(place) as name:
                    listener.bind(name)
                listener.listen(64)
                document = json.dumps(dataclasses.asdict(running(cluster)))
                (place / "running.json").write_text(document, encoding="utf-8")
                first.sendall(READY)
                _serve(place, listener, first)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    _remove_unused(place)


def _remove_unused(place: Path) -> None:
    """Remove the folder, unless somebody has started another keeper meanwhile."""
    with _locked(place):
        if not (place / "socket").exists() and not list(place.glob("run-*")):
            shutil.rmtree(place, ignore_errors=True)


def _serve(place: Path, listener: socket.socket, first: socket.socket) -> None:
    users = {first}
    while True:
        ready = select.select([listener, *users], [], [])[0]
        for connection in ready:
            if connection is listener:
                users.add(listener.accept()[0])
            elif not _still_there(connection):
                users.discard(connection)
                connection.close()
        if users:
            continue
        # Whoever attaches holds the lock, so that nobody can come between the look and the end.
        with _locked(place):
            if not select.select([listener], [], [], 0)[0]:
                (place / "socket").unlink()
                return


def _still_there(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1))
    except OSError:
        return False


def _remove_leftovers(place: Path) -> None:
    """Of keepers that were killed: their servers died with them, their files did not."""
    for folder in place.glob("run-*"):
        with contextlib.suppress(OSError), (folder / "alive").open("w") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
