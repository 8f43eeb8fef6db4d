"""`image run --config`: a container whose image and inputs are brought at once.

The parts run in processes of their own, under the deadlines of `bootseer start`, while the image is
mounted; the container starts when all are there. After any fault of ours it starts the plain way.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_runtime
from bootseer.entrypoint import job_process, part_process, standby, start_unconfigured
from bootseer.entrypoint.container.inputs import (
    InputsPlan,
    join_commands,
    plan_inputs,
    plan_plainly,
)
from bootseer.entrypoint.parts.part_task import Task
from bootseer.entrypoint.plan import format_warning
from bootseer.errors import BootseerError, describe
from bootseer.fuse.mount import mount_point
from bootseer.imageprefetch.run import podman_options, run_image
from bootseer.imageprefetch.run.run_image import ImageAtHand, Inputs, RunPlan, RunSettings

if TYPE_CHECKING:
    from bootseer.config.loading import Loaded
    from bootseer.entrypoint.container.deps_layer import DepsLayer, Surroundings
    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.mount.settings import MountSettings

CHECKPOINT = "checkpoint"
"""The directory of the mount, beside the image's tree."""
_POLL_S = 0.05  # only where the kernel has no process descriptors
_HANDED_DOWN = (
    *("BOOTSEER_TRACEPARENT", "BOOTSEER_JOB_UID", "BOOTSEER_ATTEMPT"),
    standby.VARIABLE,
)


def run(
    settings: RunSettings,
    loaded: Loaded,
    report: Callable[[RunPlan], None],
    mount: Callable[[MountSettings], MountedImage],
    complain: Callable[[str], None],
    environ: MutableMapping[str, str] = os.environ,
) -> int:
    """Run the container to its end; returns its exit code. As `run_image.run` otherwise.

    `environ` is that of all processes of the start; ours is added to it.
    """
    job = loaded.config.job
    if job.uid:
        environ["BOOTSEER_JOB_UID"] = job.uid
    if job.attempt:
        environ["BOOTSEER_ATTEMPT"] = str(job.attempt)
    runtime = os.path.abspath(settings.mount.runtime or default_runtime())
    environ["BOOTSEER_RUNTIME"] = runtime  # where all parts agree on who uses the link
    standby.claim(runtime, settings.mount.ref, loaded.config, environ)
    target = job.events or settings.mount.events_dir or environ.get("BOOTSEER_EVENTS")
    default = events.default_directory(environ)
    with events.open_writer(target or None, environ, default) as writer:
        start_unconfigured.announce_start(
            writer, settings.words or ("podman",), environ, makes_container=True
        )
        if isinstance(writer, events.Writer) and os.path.isdir(writer.target):
            mounted = dataclasses.replace(settings.mount, events_dir=writer.target)
            settings = dataclasses.replace(settings, mount=mounted)
        beside = Preparation(settings, loaded, mount, writer, environ)
        settings = dataclasses.replace(settings, beside=beside)
        return run_image.run(settings, report, mount, complain)


class Preparation:
    """The inputs of one container: `run_image.Beside`."""

    def __init__(
        self,
        settings: RunSettings,
        loaded: Loaded,
        mount_image: Callable[[MountSettings], MountedImage],
        writer: events.AnyWriter,
        environ: MutableMapping[str, str],
    ) -> None:
        self._settings, self._loaded, self._mount_image = settings, loaded, mount_image
        self._writer, self._environ = writer, environ
        self._plan = InputsPlan()
        self._folder = self._directory = ""
        self._layer: DepsLayer | None = None
        self._task: Task | None = None
        self._reported: set[tuple[str, str]] = set()
        self._without_checkpoint: str | None = None
        """Why the container has none, "" where it has; None until that is known."""

    def begin(self, folder: str) -> None:
        """Begin with all that can be brought while the image is mounted; returns at once.

        `folder` is the container's own; "" where none could be made.
        """
        self._folder = folder
        self._directory = os.path.join(folder, CHECKPOINT) if folder else ""
        try:
            taken = podman_options.list_targets(self._settings.options)
            plan = self._plan = plan_inputs(self._loaded, self._directory, taken)
        except Exception as error:  # the border: whatever is wrong with us, plain commands are left
            plan = self._plan = plan_plainly(self._loaded, describe(error))
        if plan.problems:
            job_process.say(f"warning: {format_warning(plan.problems)}; going on the plain way")
        for problem in plan.problems:
            self._writer.point("config", "fallback", {"bootseer.reason": problem.message})
        if plan.checkpoint is not None and plan.checkpoint.request is not None and folder:
            self._task = Task(plan.checkpoint, self._writer, self._environ, part_process.fork_part)

    def finish(self, image: ImageAtHand | None) -> Inputs:
        """Wait for what was begun, and bring the dependencies; returns what the container gets."""
        plan = self._plan
        options = [word for pair in self._handed_down() for word in ("--env", pair)]
        commands = []
        root = ""
        if plan.install:
            root = self._bring_deps(image)
            if not root:
                commands.append(plan.install)
        for command, reason in plan.plain:
            commands.append(command)
            if reason:
                self._report("checkpoint", "checkpoint.load", reason)
        if plan.checkpoint is not None:
            reason = self._bring_checkpoint(plan)
            if not reason:
                options += ["--volume", f"{self._directory}:{plan.checkpoint_to}:ro"]
            elif plan.checkpoint_load:
                commands.append(plan.checkpoint_load)
        return Inputs(tuple(options), join_commands(commands), root)

    def _bring_deps(self, image: ImageAtHand | None) -> str:
        """Mount a root that has the dependencies; returns it, "" where the job installs them."""
        reason = self._plan.install_reason
        if self._plan.layered and image is None:
            reason = "the image is not mounted, and its container installs"
        elif self._plan.layered and image is not None:
            from bootseer.entrypoint.container.deps_layer import DepsLayer

            self._layer = DepsLayer(self._surroundings(), image)
            try:
                self._layer.bring()
                return self._layer.root
            except (BootseerError, OSError) as error:
                self.leave_image()
                reason = describe(error)
        if reason:
            self._report("deps", "deps.install", reason)
        return ""

    def _surroundings(self) -> Surroundings:
        from bootseer.entrypoint.container.deps_layer import Surroundings

        return Surroundings(
            self._loaded.config.deps,
            self._settings.mount,
            self._folder,
            self._mount_image,
            self._writer,
            self._environ,
            self._settings.run_before,
        )

    def mounts(self) -> Sequence[tuple[str, MountedImage]]:
        """The dependencies' layer, where it is mounted."""
        return () if self._layer is None else self._layer.mounts

    def leave_image(self) -> None:
        """Unmount the container's root; twice is safe."""
        if self._layer is not None:
            self._layer.close()
            self._layer = None

    def _handed_down(self) -> Sequence[str]:
        """Variables by which the job's own events belong to this start."""
        return [f"{name}={self._environ[name]}" for name in _HANDED_DOWN if name in self._environ]

    def _bring_checkpoint(self, plan: InputsPlan) -> str:
        """Wait for the mount; returns why there is none, "" where there is one."""
        task = self._task
        if (
            self._without_checkpoint is not None
        ):  # the image was mounted, and then could not be used
            return self._without_checkpoint
        if task is None:
            assert plan.checkpoint is not None
            reason = plan.checkpoint.reason or "the container has no directory of its own"
            self._report("checkpoint", "checkpoint.load", reason)
        else:
            while (decision := task.advance()) is None and not task.has_brought:
                _await(task)
            if decision is not None:
                task.close()
                self._task = None
            reason = decision.reason if decision is not None else ""
        self._without_checkpoint = reason
        return reason

    def settle(self) -> None:
        """Wait for the end of the part's process, which may take as long as the mount itself."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            while task.has_brought and task.advance() is None:
                _await(task)
        finally:
            if task.has_brought and task.group is not None:
                task.group.kill_leader()  # alone: what it started serves the mount
            task.close()

    def _report(self, part: str, phase: str, reason: str) -> None:
        if (part, reason) in self._reported:  # the image was mounted, and then could not be used
            return
        self._reported.add((part, reason))
        job_process.say(f"{part}: {reason}; going on the plain way")
        self._writer.point(phase, "fallback", {"bootseer.reason": reason})

    def close(self) -> None:
        """End what is under way and unmount the checkpoint; twice is safe."""
        try:
            self.settle()
        finally:
            if self._directory and self._plan.checkpoint is not None:
                _unmount(self._directory)


def _await(task: Task) -> None:
    """Wait for a message of a part, its end, or its deadline."""
    with selectors.DefaultSelector() as selector:
        for descriptor in task.descriptors():
            selector.register(descriptor, selectors.EVENT_READ)
        timeout_s = _POLL_S
        if task.deadline is not None and task.group is not None and task.group.pidfd >= 0:
            timeout_s = max(0.0, task.deadline - time.monotonic())
        selector.select(timeout_s)


def _unmount(directory: str) -> None:
    """Unmount a checkpoint at the container's end, in use or not."""
    with contextlib.suppress(BootseerError):
        if mount_point.find_mount(directory) is not None:
            mount_point.unmount(directory, lazily=True)
    with contextlib.suppress(OSError):
        os.rmdir(directory)
