"""The process of a part that runs beside the job: nobody waits for it, and nothing hangs on it.

Started by `children.spawn_beside` as an orphan, with its request in descriptor 3 and without any
of the job's streams: what it has to say goes into events.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from bootseer.profiler import events

REQUEST_FD = 3
MAX_FD = 4096
MAX_REQUEST_BYTES = 1 << 20


def main() -> int:
    """Run the module that the request names; the fewer others are loaded, the sooner it reads."""
    message = json.loads(os.pread(REQUEST_FD, MAX_REQUEST_BYTES, 0))
    os.closerange(REQUEST_FD, MAX_FD)  # whoever waits for the end of a pipe must not wait for us
    with events.open_writer() as writer:
        try:
            module = importlib.import_module(message["module"])
            module.run(message["request"], writer, message["parent"])
        except Exception as error:  # the border: the job runs already, only the report may hear
            reason = str(error) or type(error).__name__
            writer.point(message["part"], "fallback", {"bootseer.reason": reason})
    return 0


if __name__ == "__main__":
    sys.exit(main())
