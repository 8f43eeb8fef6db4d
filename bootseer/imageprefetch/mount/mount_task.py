"""Mounting as a task of a fork server, for a process that goes on by itself.

The request's words are the task's name and the settings as text. The task writes one line of JSON
to its standard output: the fields of `MountedImage`, or an error as `daemon.encode_error` has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BootseerError, StoreUnavailableError
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings, decode_settings, encode_settings
from bootseer.system.processes import children_of

NAME = "image mounting"


def main(words: list[str]) -> int:
    """Mount. Where the answer reaches no reader, the mount is taken back."""
    settings = mounting.with_absolute_paths(decode_settings(words[2]))
    made = False
    try:
        try:
            answer = dataclasses.asdict(mounting.mount(settings))
            made = True
        except Exception as error:  # the border: this process ends here, and the client raises it
            answer = daemon.encode_error(error)
        daemon.send_answer(1, answer)
    except BaseException:
        if made:
            with contextlib.suppress(BootseerError):
                mounting.umount(settings.directory, lazily=True, runtime_dir=settings.runtime)
        raise
    return 0


def mount_by(
    ask: Callable[[list[str], int], int | None],
    settings: MountSettings,
    *,
    ended: str = "the agent ended while it mounted; start it again",
) -> MountedImage | None:
    """Have a fork server mount; None where there is none. Raises as `mount.mount`.

    `ask` has a server run the task: it takes the words of the request and the descriptor of its
    standard output, and returns the exit code. StoreUnavailableError with the text `ended`
    is raised where the server reported nothing.
    """
    readable, writable = os.pipe()
    with open(readable, "rb") as output:
        try:
            exit_code = ask([*NAME.split(), encode_settings(settings)], writable)
        finally:
            os.close(writable)
        if exit_code is None:
            return None
        os.set_blocking(readable, False)  # it is written by now, or never
        line = output.readline()
    if not line:
        raise StoreUnavailableError(ended)
    answer = json.loads(line)
    if "error" in answer:
        raise daemon.decode_error(answer)
    return MountedImage(**{**answer, "notes": tuple(answer["notes"])})


def end_unregistered(task: int, runtime: str) -> None:
    """Kill the image servers of a task that hangs, which may hold the lock of their image.

    Servers that have registered stay: others may use them.
    """
    registered = {one.supervisor for one in server_registry.list_records(runtime)}
    for server in children_of(task):
        if server not in registered:
            for process in (server, *children_of(server)):
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)


def take_back(settings: MountSettings) -> None:
    """Unmount what a task that was killed may have left at the directory; nothing raises."""
    settings = mounting.with_absolute_paths(settings)
    with contextlib.suppress(BootseerError):
        mounting.umount(settings.directory, lazily=True, runtime_dir=settings.runtime)
