"""Carry out a start: run the parts in parallel under deadlines, fall back, become the job.

After any fault of ours the job starts as it would without us.
Only a failed install command or a signal keeps it from starting.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Self

from bootseer import events
from bootseer.config.loading import Loaded
from bootseer.config.paths import default_runtime
from bootseer.config.sections import Config
from bootseer.entrypoint import (
    detached,
    exec_program,
    fallback,
    job_process,
    process_groups,
    start_unconfigured,
)
from bootseer.entrypoint.parts import all_parts
from bootseer.entrypoint.parts.part_task import Task
from bootseer.entrypoint.plan import PartPlan, StartPlan, format_warning, plan_start
from bootseer.errors import describe

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
POLL_S = 0.05  # only where the kernel has no process descriptors


def start(loaded: Loaded, job: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run the parts, then replace this process by the job.

    Returns only when the job is not started (the exit code to end with), or when it ran under
    the wrapper (its exit code). `environ` is the job's environment; ours is added to it.
    """
    given = dict(environ)
    try:
        return _start(loaded, job, environ)
    except Exception as error:  # the last border: no defect of ours may cost a job its start
        _warn(describe(error))
        return exec_program.execute(job, given)


def _start(loaded: Loaded, job: Sequence[str], environ: MutableMapping[str, str]) -> int:
    start_plan = plan_start(loaded, job, all_parts.REGISTRY)
    if start_plan.problems:
        _warn(format_warning(start_plan.problems))
    try:
        exit_code = _run_parts(start_plan, loaded.config, environ)
    except Exception as error:  # a border: the dependencies are still to be installed
        _warn(describe(error))
        exit_code = _run_all_plain(start_plan, environ)
    return become_job(start_plan, environ) if exit_code is None else exit_code


def _warn(text: str) -> None:
    job_process.say(f"warning: {text}; starting the plain way")


def _run_parts(
    start_plan: StartPlan, config: Config, environ: MutableMapping[str, str]
) -> int | None:
    environ.update(start_plan.environment)
    if os.path.isdir(os.path.join(default_runtime(environ), "standby")):
        from bootseer.entrypoint import standby  # on nodes that `bootseer warm` made ready

        standby.claim(default_runtime(environ), "", config, environ)
    default = events.default_directory(environ)
    with events.open_writer(config.job.events or None, environ, default) as writer:
        start_unconfigured.announce_start(writer, start_plan.job, environ)
        for problem in start_plan.problems:
            writer.point("config", "fallback", {"bootseer.reason": problem.message})
        with _Signals() as signals:
            exit_code = Runner(start_plan.parts, writer, environ, signals).run()
    if exit_code is None and signals.received:
        return 128 + signals.received[0]
    if exit_code is None and start_plan.import_times and start_plan.wrapper_options is None:
        from bootseer.profiler.collect import import_hook

        environ.update(import_hook.environment(environ))
    return exit_code


def _run_all_plain(start_plan: StartPlan, environ: Mapping[str, str]) -> int | None:
    """Run the plain command of each part, one after the other, with as little else as possible."""
    for part in start_plan.parts:
        if part.plain:
            try:
                pid = os.posix_spawnp(part.plain[0], list(part.plain), environ)
            except OSError as error:
                failure = job_process.make_failure(part.plain, error)
                return job_process.mirror_result(failure)
            exit_code = fallback.convert_wait_status(os.waitpid(pid, 0)[1])
            if exit_code:
                return exit_code
    return None


def become_job(start_plan: StartPlan, environ: Mapping[str, str]) -> int:
    """Replace this process by the job, or run it under the wrapper and return its exit code."""
    if start_plan.wrapper_options is None:
        if process_groups.reap_orphans():
            # What publishes in the background will end, and a job in the place of PID 1 would have
            # to collect a process that it does not know.
            job = start_plan.job
            return _stay_in_front(lambda: job_process.run_command(job, environ, {}))
        return exec_program.execute(start_plan.job, environ)
    try:
        from bootseer.entrypoint import run

        options = run.parse_arguments([*start_plan.wrapper_options, "--", *start_plan.job], environ)
    except Exception as error:  # a border: the job runs without a wrapper that cannot be used
        _warn(str(error))
        return exec_program.execute(start_plan.job, environ)
    return _stay_in_front(lambda: run.run_measured(options, environ))


def _stay_in_front(run_job: Callable[[], job_process.Result]) -> int:
    try:
        return job_process.mirror_result(run_job())
    except Exception as error:  # a border; the job may have begun, and must not begin twice
        job_process.say(f"{describe(error)}; the job's exit code is not known")
        return 1


class _Signals:
    """Records the signals that end a start, and wakes the loop; ignored ones stay ignored."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, object] = {}
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._record)
        # Ignored, the kernel would reap our children and drop their exit codes.
        self._child_signal = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def _record(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)

    def __exit__(self, *_: object) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, self._child_signal)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.read_fd)
        os.close(self._write_fd)


class Runner:
    """Runs the parts of one start to their end, in one thread."""

    def __init__(
        self,
        plans: Sequence[PartPlan],
        writer: events.NullWriter,
        environ: Mapping[str, str],
        signals: _Signals,
    ) -> None:
        self._waiting = list(plans)
        self._writer = writer
        self._environ = environ
        self._signals = signals
        self._running: list[Task] = []
        self._done: set[str] = set()
        self._names = {part.name for part in plans}

    def run(self) -> int | None:
        """Return None when the job may start, else the exit code to end with."""
        try:
            return self._loop()
        finally:
            for task in self._running:
                task.close()

    def _loop(self) -> int | None:
        while True:
            if self._signals.received:
                return self._stop(128 + self._signals.received[0])
            self._begin_ready()
            if not self._running:
                return None
            self._wait()
            for task in list(self._running):
                decision = task.advance()
                if decision is None:
                    continue
                self._running.remove(task)
                self._done.add(task.plan.name)
                if decision.step == "stop":
                    return self._stop(decision.exit_code)

    def _begin_ready(self) -> None:
        for part in list(self._waiting):
            if all(name in self._done or name not in self._names for name in part.after):
                self._waiting.remove(part)
                if part.request is None and not part.plain:
                    self._leave_out(part)
                    continue
                if part.detached_module and part.request is not None:
                    self._start_detached(part)
                    continue
                self._running.append(Task(part, self._writer, self._environ))

    def _leave_out(self, part: PartPlan) -> None:
        """Go on without a part that is not to be tried and has no plain way."""
        self._done.add(part.name)
        if part.reason:
            job_process.say(f"{part.name}: {part.reason}; going on without it")
            self._writer.point(part.phase, "fallback", {"bootseer.reason": part.reason})

    def _start_detached(self, part: PartPlan) -> None:
        self._done.add(part.name)
        try:
            request = {**(part.request or {}), "began_ns": time.time_ns()}
            detached.start_detached(part.name, part.detached_module, request, self._environ)
        except OSError as error:
            reason = f"its process could not be started: {error.strerror}"
            self._writer.point(part.phase, "fallback", {"bootseer.reason": reason})

    def _wait(self) -> None:
        """Wait for the end of a process, a message, a signal or a deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.read_fd, selectors.EVENT_READ)
            for task in self._running:
                for fd in task.descriptors():
                    selector.register(fd, selectors.EVENT_READ)
            deadlines = [task.deadline for task in self._running if task.deadline is not None]
            timeout = min([86400.0, *(deadline - time.monotonic() for deadline in deadlines)])
            if any(task.group is not None and task.group.pidfd < 0 for task in self._running):
                timeout = min(timeout, POLL_S)
            selector.select(max(0.0, timeout))

    def _stop(self, exit_code: int) -> int:
        """End all parts; they first get the signal that ends this start."""
        for number in self._signals.received:
            for task in self._running:
                task.forward_signal(number)
        process_groups.end_groups([task.group for task in self._running if task.group is not None])
        for task in self._running:
            task.abandon(exit_code)
        return exit_code
