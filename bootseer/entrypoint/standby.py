"""Whether a start found its node made ready for it: by `bootseer warm`, and by no start since.

`<runtime>/standby/<digest of the inputs>` is written by `warm` when the node is ready. The first
job that starts with these inputs claims it, by its uid; all of this job's starts on the node count
as started from stand-by, those of other jobs do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping

from bootseer.config.sections import Config
from bootseer.events.resource import digest, job_uid
from bootseer.system import file_lock
from bootseer.system.atomic import replace_file

FOLDER = "standby"
VARIABLE = "BOOTSEER_STANDBY"
"""Set for a start from stand-by: its events then say so (`bootseer.start.kind`)."""
_MOST_BYTES = 4096


def mark_ready(runtime: str, image: str, config: Config) -> None:
    """Note that the node is ready for jobs with these inputs; nothing raises."""
    path = _path_of(runtime, image, config)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, b"", mode=0o600, sync=False)


def claim(runtime: str, image: str, config: Config, environ: MutableMapping[str, str]) -> None:
    """Set `VARIABLE` where a job starts from stand-by, and remove it where not."""
    environ.pop(VARIABLE, None)
    path = _path_of(runtime, image, config)
    uid = job_uid(environ).encode()
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        file_lock.lock(file.fileno())
        owner = file.read(_MOST_BYTES)
        if owner and owner != uid:
            return
        file.seek(0)
        file.write(uid or b"-")
        environ[VARIABLE] = "1"


def _path_of(runtime: str, image: str, config: Config) -> str:
    deps, checkpoint = config.deps, config.checkpoint
    words = (image, *deps.install, checkpoint.url, checkpoint.to, checkpoint.cache)
    return os.path.join(runtime, FOLDER, digest("\0".join(words)))
