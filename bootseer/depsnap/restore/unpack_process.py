"""Unpack an archive in a fresh interpreter, which can be left behind where a file system hangs.

The process is given an `Order` on its standard input and answers on its standard output; a byte
comes through a pipe of its own for each frame that it has read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bootseer import errors
from bootseer.depsnap.types import Digest, Limits, Omissions, UnpackPolicy
from bootseer.errors import BootseerError, DeadlineError
from bootseer.system.child_processes import command_for, end_with_parent

_MOST_POLL_MS = (1 << 31) - 1
_END_S = 1.0
"""How long a killed process may take to end."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is to unpack, and where; see `unpack.unpack`."""

    path: str
    digest: Digest
    destinations: list[str]
    policy: UnpackPolicy
    limits: Limits
    packed: bool

    def encode(self) -> bytes:
        """The order as JSON."""
        owners = self.policy.owners
        return json.dumps(
            {
                "path": self.path,
                "digest": self.digest,
                "destinations": self.destinations,
                "jobs": self.policy.jobs,
                "allow_setuid": self.policy.allow_setuid,
                "owners": None if owners is None else sorted(owners),
                "limits": asdict(self.limits),
                "packed": self.packed,
            }
        ).encode()

    @classmethod
    def decode(cls, text: str) -> Order:
        """The order that `encode` made."""
        body = json.loads(text)
        owners = body["owners"]
        policy = UnpackPolicy(
            body["jobs"],
            body["allow_setuid"],
            None if owners is None else frozenset((uid, gid) for uid, gid in owners),
        )
        return cls(
            path=body["path"],
            digest=body["digest"],
            destinations=body["destinations"],
            policy=policy,
            limits=Limits(**body["limits"]),
            packed=body["packed"],
        )


def unpack_in_process(
    module: str, order: Order, frames: int, keep_open: Sequence[int], stall_s: float | None
) -> Omissions:
    """Have a fresh interpreter run `module.main`, which is to call `serve`, for an order.

    It inherits `keep_open`. Raises the errors of unpacking, and DeadlineError once it has read
    none of the archive's `frames` for `stall_s`.
    """
    beat_out, beat_in = os.pipe()
    try:
        child = subprocess.Popen(
            command_for(module, str(os.getpid()), str(beat_in)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A process that is left behind must not keep our standard error open for its reader.
            stderr=None if stall_s is None else subprocess.DEVNULL,
            pass_fds=(*keep_open, beat_in),
            start_new_session=True,  # its workers are killed with it, wherever they hang
        )
    finally:
        os.close(beat_in)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as stream:
            stream.write(order.encode())
        answer = _read_answer(child.stdout.fileno(), beat_out, order.path, frames, stall_s)
    finally:
        os.close(beat_out)
        if child.stdout is not None:
            child.stdout.close()
        if child.poll() is None:
            _end(child)
    reply: dict[str, Any] = {"error": "BootseerError", "text": "the restoring process died"}
    if answer:
        reply = json.loads(answer)
    if "error" in reply:
        raise getattr(errors, reply["error"])(reply["text"])
    return Omissions(**reply)


def _read_answer(answer: int, beat: int, path: str, frames: int, stall_s: float | None) -> bytes:
    """The whole answer of the process; DeadlineError where its reads of `path` stall."""
    poll = select.poll()
    poll.register(answer, select.POLLIN)
    poll.register(beat, select.POLLIN)
    text, left = b"", frames
    while True:
        is_read = frames > 0 and left <= 0
        limit_ms = None if stall_s is None or is_read else min(stall_s * 1000, _MOST_POLL_MS)
        ready = [descriptor for descriptor, _ in poll.poll(limit_ms)]
        if not ready:
            raise DeadlineError(
                f"reading {path} brought nothing for {stall_s:g} s, with {frames - left} of "
                f"{frames} frames read"
            )
        if beat in ready:
            beats = len(os.read(beat, 1 << 16))
            left -= beats
            if not beats:  # all workers ended
                poll.unregister(beat)
        if answer in ready:
            part = os.read(answer, 1 << 16)
            if not part:
                return text
            text += part


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process with its workers; one that hangs in the kernel is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def serve(carry_out: Callable[[Order, int], Omissions]) -> None:
    """In the fresh process: read the order, carry it out, and answer.

    `carry_out` is given the descriptor of the pipe that gets a byte for each frame read.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # our parent ended before that call
        return
    order = Order.decode(sys.stdin.read())
    try:
        reply: dict[str, object] = asdict(carry_out(order, int(sys.argv[2])))
    except BootseerError as error:
        reply = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps(reply))
