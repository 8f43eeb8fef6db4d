"""The process of a part that runs beside the job: nobody waits for it, and nothing hangs on it.

Started by `children.spawn_beside` as an orphan, with its request in descriptor 3 and without any
of the job's streams: what it has to say goes into events.
"""

from __future__ import annotations

import json
import os
import sys

from bootseer.entrypoint import parts
from bootseer.profiler import events

REQUEST_FD = 3
MAX_FD = 4096
MAX_REQUEST_BYTES = 1 << 20


class _Nobody:
    """`Progress` for which nobody waits."""

    def command_began(self) -> None: ...

    def command_ended(self, exit_code: int) -> None: ...


def main() -> int:
    """Run the part that the request names."""
    message = json.loads(os.pread(REQUEST_FD, MAX_REQUEST_BYTES, 0))
    os.closerange(REQUEST_FD, MAX_FD)  # whoever waits for the end of a pipe must not wait for us
    part = parts.by_name(message["part"])
    with events.open_writer() as writer:
        try:
            return part.run({**message["request"], "for_pid": message["parent"]}, writer, _Nobody())
        except Exception as error:  # the border: the job runs already, only the report may hear
            reason = str(error) or type(error).__name__
            writer.point(part.name, "fallback", {"bootseer.reason": reason})
    return 0


if __name__ == "__main__":
    sys.exit(main())
