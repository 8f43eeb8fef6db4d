"""Mounts for the snapshotter, made by a fork server: the snapshotter itself has many threads."""

from __future__ import annotations

import functools
import os

from bootseer.agent.fork_server import TaskTable
from bootseer.agent.private_server import PrivateServer
from bootseer.imageprefetch.mount import mount_task
from bootseer.imageprefetch.mount.mount import START_LIMIT_S
from bootseer.imageprefetch.mount.settings import MountSettings

TASKS = TaskTable(
    {mount_task.NAME: f"{mount_task.__name__}:main"},
    # Importing what each mount imports takes longer than a mount.
    modules=(
        "bootseer.fuse.serve.handover",
        "bootseer.imageprefetch.mount.mount_worker",
        "bootseer.storage.oci.open",
        "bootseer.storage.oci.registry_repository",
        "bootseer.storage.token_files",
    ),
)
_LIMIT_S = START_LIMIT_S + 10.0


class MountHelper:
    """Any thread may mount.

    Mounts write their events to `events_dir`; with "" where this process's environment says.
    """

    def __init__(self, events_dir: str = "") -> None:
        environ = {"BOOTSEER_EVENTS": os.path.abspath(events_dir)} if events_dir else {}
        self.server = PrivateServer("what mounts images", TASKS, limit_s=_LIMIT_S, environ=environ)

    def mount(self, settings: MountSettings) -> None:
        """Mount. Raises as `mount.mount`, DeadlineError and StoreUnavailableError."""
        what = f"what mounts at {settings.directory}"
        ask = functools.partial(self.server.ask, what=what)
        mount_task.mount_by(ask, settings, ended=f"{what} ended before it had; try again")
