"""Sub-phases of the install's event, from pip's own log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from bootseer.depsnap.key.install_command import plan
from bootseer.events.writer import NullWriter, Writer
from bootseer.profiler.collect import pip_log

_VARIABLE = "PIP_LOG"


@contextlib.contextmanager
def record_phases(
    command: Sequence[str], environ: dict[str, str], writer: NullWriter, span: str
) -> Iterator[None]:
    """Let a pip command log to a private file, and write its sub-phases below `span`.

    Adds PIP_LOG to `environ` unless the user set a log, no pip is run or no events are written.
    """
    path = _make_log(command, environ) if isinstance(writer, Writer) else None
    if path is None:
        yield
        return
    environ[_VARIABLE] = path
    try:
        yield
        _write_phases(path, writer, span)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _make_log(command: Sequence[str], environ: dict[str, str]) -> str | None:
    runs_pip = any(install.tool == "pip" for install in plan(command))
    if not runs_pip or _VARIABLE in environ or any(w.startswith("--log") for w in command):
        return None
    try:
        fd, path = tempfile.mkstemp(prefix="bootseer-pip-", suffix=".log")
    except OSError:
        return None
    os.close(fd)
    return path


def _write_phases(path: str, writer: NullWriter, span: str) -> None:
    try:
        for name, begin_ns, end_ns, attributes in pip_log.sub_phases(path):
            child = writer.begin(name, attributes, span, begin_ns)
            writer.end(child, name, "ok", attributes, end_ns)
    except Exception:
        # The border: a log that is misread costs the sub-phases, never the install.
        return
