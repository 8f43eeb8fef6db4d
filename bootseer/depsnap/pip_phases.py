"""Sub-phases of the install's event, from pip's own log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bootseer.depsnap.key.install_command import plan
from bootseer.events.writer import NullWriter, Writer
from bootseer.profiler.collect.private_pip_log import VARIABLE, PrivatePipLog


@contextlib.contextmanager
def record_phases(
    command: Sequence[str], environ: dict[str, str], writer: NullWriter, span: str
) -> Iterator[None]:
    """Let a pip command log to a private file, and write its sub-phases below `span`.

    Adds PIP_LOG to `environ` unless the user set a log, no pip is run or no events are written.
    """
    log = _make_log(command, environ) if isinstance(writer, Writer) else None
    if log is None:
        yield
        return

    def write(name: str, begin_ns: int, end_ns: int, attributes: dict[str, Any]) -> None:
        child = writer.begin(name, attributes, span, begin_ns)
        writer.end(child, name, "ok", attributes, end_ns)

    environ[VARIABLE] = log.path
    try:
        yield
        log.finish(write)
    finally:
        log.remove()


def _make_log(command: Sequence[str], environ: dict[str, str]) -> PrivatePipLog | None:
    runs_pip = any(install.tool == "pip" for install in plan(command))
    if not runs_pip or VARIABLE in environ or any(w.startswith("--log") for w in command):
        return None
    try:
        return PrivatePipLog.create(environ)
    except OSError:
        return None
