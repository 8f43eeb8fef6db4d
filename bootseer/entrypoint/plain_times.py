"""How long plain commands took on this node: what their replacement may lose by waiting in vain.

A store that is silent costs no more than the larger of `LEAST_S` and a tenth of what the plain way
took last time; where that is not known, `LEAST_S`. One small file a command in `<cache>/plain/`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from bootseer.config.paths import default_cache
from bootseer.events.resource import digest
from bootseer.system.atomic import replace_file

FOLDER = "plain"
LEAST_S = 5.0
SHARE = 0.1
_MOST_S = 600.0
_MOST_BYTES = 64


def note_duration(command: Sequence[str], seconds: float) -> None:
    """Remember how long a plain command took; nothing raises."""
    path = _path_of(command)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, f"{seconds:.3f}\n".encode(), mode=0o600, sync=False)


def find_patience_s(command: Sequence[str]) -> float:
    """How long what replaces a plain command may wait for nothing."""
    with contextlib.suppress(OSError, ValueError), open(_path_of(command), "rb") as file:
        return min(_MOST_S, max(LEAST_S, SHARE * float(file.read(_MOST_BYTES))))
    return LEAST_S


def _path_of(command: Sequence[str]) -> str:
    return os.path.join(os.path.abspath(default_cache()), FOLDER, digest("\0".join(command)))
