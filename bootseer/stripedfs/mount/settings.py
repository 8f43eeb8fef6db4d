"""The settings of a mount of checkpoints, with their defaults."""

from __future__ import annotations

import math
from typing import Literal

from bootseer import light_dataclasses as dataclasses
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.stripedfs.write.write_settings import WriteSettings

Backend = Literal["own", "fusepy"]
DIRECT_BYTES = 4 << 20
"""Files from this size on bypass the page cache: a checkpoint is read once."""
NEVER_DIRECT = 1 << 63
MEMORY_BYTES = 432 << 20  # of blocks; the process around it needs some 70 MiB
DEADLINE_S = 60.0
CACHE_LIMIT_BYTES = 64 << 30
WRITING = WriteSettings()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """One mount. `url` is a folder, a checkpoint or a file of a store.

    Files of `direct_bytes` and more bypass the page cache; `writable` lets files be saved. All
    that mounting asks of the store may take `look_s`. Reads that get no bytes for `deadline_s` fail
    with EIO. `cache` is a directory of this node that keeps what was read; blocks in memory take
    `memory_bytes`.
    `prefetch` names what is fetched at once, before anybody reads it (see `expected_load`; None:
    nothing).
    With `for_pid` the mount ends with that process. `over`: a mount of ours that is served at the
    mount point already is covered. `log_file` gets a line for each fault.
    """

    url: str
    mountpoint: str
    options: StoreOptions = DEFAULTS
    writable: bool = False
    writing: WriteSettings = WRITING
    direct_bytes: int = DIRECT_BYTES
    allow_other: bool = False
    cache: str = ""
    cache_limit_bytes: int = CACHE_LIMIT_BYTES
    memory_bytes: int = MEMORY_BYTES
    connections: int = 0
    look_s: float = math.inf
    deadline_s: float = DEADLINE_S
    backend: Backend = "own"
    for_pid: int = 0
    over: bool = False
    log_file: str = ""
    prefetch: str | None = None
