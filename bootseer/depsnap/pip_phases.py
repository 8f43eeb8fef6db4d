"""pip's own log, turned into sub-phases of the install."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from bootseer.depsnap.key.install_command import plan
from bootseer.events.writer import NullWriter, Writer
from bootseer.profiler.collect import pip_log

VARIABLE = "PIP_LOG"


@contextlib.contextmanager
def watching(
    command: Sequence[str], environ: dict[str, str], writer: NullWriter, span: str
) -> Iterator[None]:
    """Let a pip command keep its log in a private file, and write its sub-phases below `span`.

    Adds PIP_LOG to `environ` unless the user set a log, no pip is run or no events are kept.
    """
    path = _log(command, environ) if isinstance(writer, Writer) else None
    if path is None:
        yield
        return
    environ[VARIABLE] = path
    try:
        yield
        _write(path, writer, span)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _log(command: Sequence[str], environ: dict[str, str]) -> str | None:
    runs_pip = any(install.tool == "pip" for install in plan(command))
    if not runs_pip or VARIABLE in environ or any(w.startswith("--log") for w in command):
        return None
    try:
        fd, path = tempfile.mkstemp(prefix="bootseer-pip-", suffix=".log")
    except OSError:
        return None
    os.close(fd)
    return path


def _write(path: str, writer: NullWriter, span: str) -> None:
    try:
        for name, begin_ns, end_ns, attributes in pip_log.sub_phases(path):
            child = writer.begin(name, attributes, span, begin_ns)
            writer.end(child, name, "ok", attributes, end_ns)
    except Exception:
        # The border: a log that we misread costs the sub-phases, never the install.
        return
