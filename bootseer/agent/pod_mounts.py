"""FUSE mounts for processes that may not mount: the agent mounts, they serve.

A process of a pod sends a descriptor of a directory over a Unix socket, and gets a `/dev/fuse`
descriptor back (`fuse.mount.agent_mount` is the other side). Nothing that it writes is believed:
who it is comes from the socket (SO_PEERCRED), which directory it means from the descriptor, what is
mounted there from the kernel's tables. A mount is made

- in the mount namespace of the process, at a directory of that namespace,
- which the process's user owns, on a file system of a disk or of memory,
- where no mount would be seen by others (`shared`, as on a volume that propagates to the node),
- without setuid programs and devices, for that user alone,
- `MOST_MOUNTS` times for a user in a mount namespace, a few more where they are asked for at once,
- of which `MOST_AT_ONCE` requests are carried out at a time,
- in mount namespaces of the agent's own user namespace only,
- and not while the agent drains.

A user may have unmounted what was mounted so for the same user. Each request is carried out by a
process of its own, and the system calls within the pod's namespace by a further one, which reads no
file there: that file system is the pod's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bootseer.agent.drain import CREDENTIALS, is_draining, source_of_pods
from bootseer.errors import from_os_error
from bootseer.fuse.mount.agent_mount import MOST_BYTES, MOUNT, UNMOUNT, VERSION
from bootseer.fuse.mount.mount import DEVICE
from bootseer.fuse.mount.mount_point import KIND
from bootseer.system.child_processes import close_descriptors, end_with_parent, fork, name_thread
from bootseer.system.libc import libc
from bootseer.system.mount_calls import MS_NODEV, MS_NOSUID, MS_RDONLY
from bootseer.system.processes import mount_namespace

FOLDER, NAME = "pods", "fuse.sock"
MOST_MOUNTS = 32
MOST_AT_ONCE, MOST_IN_ALL = 4, 64
"""Requests of one mount namespace, and of all, that are carried out at a time."""
LIMIT_S = 4
"""Less than the other side waits."""
_RECEIVE_S, _SEND_S, _DROP_S = 1.0, 0.5, 0.05
_MOST_READ_BYTES = 1 << 20
_KINDS = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
)
"""What may be covered: no proc or sysfs, which others read, and nothing that may not answer."""
_FIELDS = {
    MOUNT: frozenset(("version", "what", "read_only", "fsname", "max_read_bytes")),
    UNMOUNT: frozenset(("version", "what")),
}
_CLONE_NEWNS = 0x20000
_NS_GET_USERNS = 0xB701
_MNT_DETACH = 2
_NAME_CHARS = 200


class RefusedError(Exception):
    """Why a request is not carried out, in words for who asked."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks, as the kernel says."""

    process: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Place:
    """The mount that a directory's descriptor lies in, as the peer's namespace lists it."""

    kind: str
    is_shared: bool
    owner: int
    ours: int
    """How many mounts of ours for this user the namespace has."""


def start(runtime: str) -> int:
    """Listen in `<runtime>/pods`, in a new process that ends with this one; returns its id.

    Raises the errors of `from_os_error`.
    """
    folder = os.path.join(runtime, FOLDER)
    path = os.path.join(folder, NAME)
    libc()  # loaded before any namespace is entered
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        os.chmod(folder, 0o755)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        umask = os.umask(0o111)
        try:
            listener.bind(path)
        finally:
            os.umask(umask)
        listener.listen(64)
    except OSError as error:
        raise from_os_error(error, f"listen at {path}") from error
    agent = os.getpid()
    child = fork()
    if child == 0:
        _serve(listener, agent, runtime)
    listener.close()
    return child


def _serve(listener: socket.socket, agent: int, runtime: str) -> NoReturn:
    try:
        close_descriptors(0, 1, 2, listener.fileno())  # the agent's place must be free after it
        end_with_parent(signal.SIGKILL)
        name_thread(b"bootseer-fuse")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # those are for the agent
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        running: dict[int, int] = {}  # children, by the mount namespaces that they work for
        while os.getppid() == agent:
            with contextlib.suppress(OSError):
                link, _ = listener.accept()
                with link:
                    _reap(running)
                    namespace = mount_namespace(_peer_of(link).process)
                    mine = sum(one == namespace for one in running.values())
                    if mine >= MOST_AT_ONCE or len(running) >= MOST_IN_ALL:
                        # Read, as what is closed unread is a broken connection to its peer.
                        link.settimeout(_DROP_S)
                        with contextlib.suppress(TimeoutError):
                            link.recv(MOST_BYTES)
                        _send(link, "too many requests at a time; try again")
                        continue
                    child = fork()
                    if child == 0:
                        listener.close()
                        _answer(link, runtime)
                    running[child] = namespace
    finally:
        os._exit(1)


def _reap(running: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while child := os.waitpid(-1, os.WNOHANG)[0]:
            running.pop(child, None)


def _peer_of(link: socket.socket) -> Peer:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return Peer(*CREDENTIALS.unpack(credentials))


def _send(link: socket.socket, error: str, descriptors: Sequence[int] = ()) -> None:
    link.settimeout(_SEND_S)
    socket.send_fds(link, [json.dumps({"error": error}).encode()], descriptors)


def _answer(link: socket.socket, runtime: str) -> NoReturn:
    """Carry out one request, in a process of its own."""
    try:
        end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("0")  # the agent's own is for the agent
        error, descriptors = "", list[int]()
        try:
            descriptors = _carry_out(link, _peer_of(link), runtime)
        except RefusedError as refusal:
            error = str(refusal)
        except OSError as fault:
            error = fault.strerror or str(fault)
        except (ValueError, KeyError, TypeError) as fault:
            error = f"the request cannot be read ({fault})"
        _send(link, error, descriptors)
    finally:
        os._exit(0)


def _carry_out(link: socket.socket, peer: Peer, runtime: str) -> list[int]:
    """Mount or unmount; returns the descriptors for the peer."""
    link.settimeout(_RECEIVE_S)
    data, received, _, _ = socket.recv_fds(link, MOST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    if len(received) != 1:
        raise RefusedError("send one descriptor, of the directory")
    (directory,) = received
    request = _read_request(data)
    # One directory, so that all is of one process, whatever becomes of its number.
    about = os.open(f"/proc/{peer.process}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    namespace = os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=about)
    _check_owner(namespace)
    place = _find_place(about, directory, peer.uid)
    if request["what"] == UNMOUNT:
        if place.kind != KIND or place.owner != peer.uid:
            raise RefusedError("nothing of this user's is mounted there")
        if place.is_shared:
            raise RefusedError("others see that mount (its volume propagates mounts)")
        _call_within(namespace, lambda: _unmount(directory))
        return []
    if is_draining(runtime):
        raise RefusedError("it is to end, and mounts nothing more")
    _check_place(peer, place, directory)
    link.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        if not link.recv(1, socket.MSG_PEEK):
            raise RefusedError("nobody waits for it any more")
    return [_mount_for(peer, namespace, directory, request, runtime)]


def _read_request(data: bytes) -> dict[str, Any]:
    """A request that is understood whole: what a field asks for must not be left out."""
    request = json.loads(data)
    if not isinstance(request, dict):
        raise ValueError("it is no object")
    if request["what"] not in _FIELDS:
        raise RefusedError("only mount and unmount can be asked for")
    unknown = sorted(map(str, request.keys() - _FIELDS[request["what"]]))
    if request.get("version", VERSION) != VERSION or unknown:
        raise RefusedError("the request is of another version of bootseer than this agent")
    return request


def _check_owner(namespace: int) -> None:
    """Refuse a mount namespace whose owner is another user namespace than ours.

    Its owner could lift what the agent's mount forbids. The process may have entered it just now,
    so that its own user namespace says nothing.
    """
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        if not os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user")):
            raise RefusedError("this process is in a user namespace of its own")
    finally:
        os.close(owner)


def _find_place(about: int, directory: int, uid: int) -> Place:
    """Where a descriptor points to, by the kernel's own numbers."""
    with open(f"/proc/self/fdinfo/{directory}", encoding="ascii") as file:
        fields_of = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
    number = fields_of["mnt_id"].strip()
    found: Place | None = None
    ours = 0
    mounts = os.open("mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=about)
    with open(mounts, "rb") as file:
        for line in file:
            left, _, right = line.rstrip(b"\n").partition(b" - ")
            fields, (kind, _, rest) = left.split(b" "), right.partition(b" ")
            options = rest.rpartition(b" ")[2].split(b",")
            owners = [int(o[8:]) for o in options if o.startswith(b"user_id=")]
            ours += kind == KIND.encode() and owners == [uid]
            if fields[0].decode() == number:
                is_shared = any(field.startswith(b"shared:") for field in fields[6:])
                found = Place(kind.decode(), is_shared, (owners or [-1])[0], 0)
    if found is None:
        raise RefusedError("the directory is not one of this process's mount namespace")
    return Place(found.kind, found.is_shared, found.owner, ours)


def _check_place(peer: Peer, place: Place, directory: int) -> None:
    if place.kind not in _KINDS:
        raise RefusedError(f"nothing is mounted over a file system of the kind {place.kind}")
    if place.is_shared:
        raise RefusedError("a mount there would be seen outside (its volume propagates mounts)")
    if place.ours >= MOST_MOUNTS:
        raise RefusedError(f"there are {MOST_MOUNTS} mounts already")
    status = os.fstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise RefusedError("it is no directory")
    if status.st_uid != peer.uid:
        raise RefusedError(f"the directory is not owned by the user {peer.uid}")


def _mount_for(
    peer: Peer, namespace: int, directory: int, request: dict[str, Any], runtime: str
) -> int:
    most = int(request["max_read_bytes"])
    if not 4096 <= most <= _MOST_READ_BYTES:
        raise RefusedError(f"max_read_bytes is to be within 4096 and {_MOST_READ_BYTES}")
    name = "".join(c for c in str(request["fsname"])[:_NAME_CHARS] if c.isprintable() and c != ",")
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if request["read_only"] else 0)
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    data = (
        f"fd={device},rootmode=40000,user_id={peer.uid},group_id={peer.gid},default_permissions,"
        f"max_read={most}"
    )
    words = (os.fsencode(source_of_pods(runtime) + name), KIND.encode(), flags, data.encode())
    _call_within(namespace, lambda: _mount(directory, *words))
    return device


def _mount(directory: int, name: bytes, kind: bytes, flags: int, data: bytes) -> int:
    return int(libc().mount(name, b"self/fd/%d" % directory, kind, flags, data))


def _unmount(directory: int) -> int:
    return int(libc().umount2(b"self/fd/%d" % directory, _MNT_DETACH))


def _call_within(namespace: int, call: Callable[[], int]) -> None:
    """Make a system call within a mount namespace, in a process that does nothing else.

    Its working directory is the agent's own /proc, by which `call` names descriptors. Raises
    OSError with the call's error number.
    """
    import ctypes

    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    enter = libc().setns
    child = fork()
    if child == 0:
        code = 255
        try:
            end_with_parent(signal.SIGKILL)
            code = ctypes.get_errno() if enter(namespace, _CLONE_NEWNS) else 0
            if not code:
                os.fchdir(processes)
                code = ctypes.get_errno() if call() else 0
        finally:
            os._exit(code)
    os.close(processes)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(abs(code), os.strerror(abs(code)))
