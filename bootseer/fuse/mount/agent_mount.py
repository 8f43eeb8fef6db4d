"""Mounting by the node's agent, where this process has no privilege to: in a pod above all.

The agent's socket is shown to the pod. Over it go one JSON object and a descriptor (O_PATH) of the
directory; back come another object and, for a mount, the `/dev/fuse` descriptor to serve. The agent
looks only at what the kernel tells of this process and of the directory: see `agent.pod_mounts`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from bootseer.errors import AccessDeniedError, from_os_error

if TYPE_CHECKING:
    from bootseer.fuse.mount.mount_options import MountOptions

VARIABLE = "BOOTSEER_AGENT_SOCKET"
SOCKET = "/run/bootseer/pods/fuse.sock"
SOURCE = "bootseer-pod:"
"""How the source of a mount begins that an agent made; its own mark and a colon follow."""
"""Where the agent of a node listens, and where pods have its directory."""
MOST_BYTES = 4096
LIMIT_S = 5.0
MOUNT, UNMOUNT = "mount", "unmount"
VERSION = 1
"""Of the requests; an agent refuses those of a version, or with fields, that it does not know."""


def is_there() -> bool:
    """Whether an agent may be asked: its socket is root's."""
    try:
        return os.stat(_path()).st_uid == 0
    except OSError:
        return False


def mount_by_agent(mountpoint: str, options: MountOptions) -> int:
    """Have the agent mount; returns the descriptor to serve.

    Raises AccessDeniedError with the agent's reason, StoreUnavailableError and the like where it
    does not answer within `LIMIT_S`.
    """
    request = {
        "version": VERSION,
        "what": MOUNT,
        "read_only": options.read_only,
        "fsname": options.fsname,
        "max_read_bytes": options.max_read_bytes,
    }
    descriptors = _ask(request, mountpoint)
    if len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise AccessDeniedError(f"mount at {mountpoint}: the node's agent sent no descriptor")
    return descriptors[0]


def unmount_by_agent(mountpoint: str) -> None:
    """Have the agent unmount, lazily, what this user mounted so. Raises as `mount_by_agent`."""
    for descriptor in _ask({"version": VERSION, "what": UNMOUNT}, mountpoint):
        os.close(descriptor)


def _ask(request: dict[str, Any], mountpoint: str) -> list[int]:
    import socket  # takes milliseconds, and a mount by root does without

    path, what = _path(), request["what"]
    try:
        directory = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.settimeout(LIMIT_S)
                link.connect(path)
                socket.send_fds(link, [json.dumps(request).encode()], [directory])
                flags = socket.MSG_CMSG_CLOEXEC
                data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, 1, flags)
        finally:
            os.close(directory)
    except OSError as error:
        action = f"have the node's agent at {path} {what} {mountpoint}"
        raise from_os_error(error, action) from error
    try:
        refusal = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        refusal = "its answer cannot be read"
    if refusal:
        for descriptor in descriptors:
            os.close(descriptor)
        raise AccessDeniedError(f"{what} {mountpoint}: the node's agent refuses: {refusal}")
    return list(descriptors)


def _path() -> str:
    return os.environ.get(VARIABLE) or SOCKET
