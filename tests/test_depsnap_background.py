"""What a publication in the background has of the process that began it."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.depsnap import background
from bootseer.fork import fork


def test_what_a_library_prints_goes_nowhere(tmp_path: Path) -> None:
    """Neither an error nor a line in the next file that is opened, as those of the store."""
    ready, tell = os.pipe()
    path = tmp_path / "archive"
    child = fork()
    if child == 0:
        try:
            background._quiet(tell)
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            print("printed", flush=True)
            os.write(file, b"packed")
            os.write(tell, b"done")
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(ready, 10) == b"done"
    os.close(ready)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"packed"
