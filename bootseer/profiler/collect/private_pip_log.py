"""A log file that one pip command writes for us alone. Python 3.9, and imports next to nothing."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

VARIABLE = "PIP_LOG"


class PrivatePipLog:
    """The file at `path`, from which the sub-phases are read when pip has ended."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def create(cls, environ: Mapping[str, str]) -> PrivatePipLog:
        """Make an empty file in TMPDIR, or in /tmp where that cannot be; raises OSError."""
        name = f"bootseer-pip-{os.getpid()}-{os.urandom(6).hex()}.log"
        try:
            path = _create_in(environ.get("TMPDIR") or "/tmp", name)
        except OSError:
            path = _create_in("/tmp", name)
        return cls(path)

    def finish(self, write: Callable[[str, int, int, dict[str, Any]], None]) -> None:
        """Call `write` with each sub-phase, as `pip_log.SubPhase`, and remove the file.

        No fault of the log or of `write` rises: the sub-phases are optional.
        """
        try:
            from bootseer.profiler.collect import pip_log

            for name, begin_ns, end_ns, attributes in pip_log.sub_phases(self.path):
                write(name, begin_ns, end_ns, attributes)
        except Exception:  # whatever the log contains
            pass
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove the file; twice is safe."""
        try:
            os.unlink(self.path)
        except OSError:
            pass  # the command removed it


def _create_in(folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path
