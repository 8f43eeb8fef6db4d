"""Paths and names that no scan of an install's roots looks at."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bootseer.system.mountinfo import all_mounts
from bootseer.system.paths import is_within

_PSEUDO_NAMES = """
    proc sysfs devtmpfs devpts tmpfs cgroup cgroup2 mqueue debugfs tracefs securityfs pstore bpf
    configfs fusectl hugetlbfs ramfs binfmt_misc autofs nsfs efivarfs rpc_pipefs nfs nfs4 cifs ceph
    lustre fuse.sshfs
"""
_PSEUDO = frozenset(_PSEUDO_NAMES.split())
"""File systems of the kernel or of another machine, whose contents no install has made."""
_TEMPORARY = ("/tmp", "/var/tmp", "/var/cache", "/var/log", "/run", "/proc", "/sys", "/dev")
_CACHES = (".cache", ".npm/_cacache")
"""Below the user's home."""


def list_exclusions(roots: Sequence[str], ours: Sequence[str], given: Sequence[str]) -> list[str]:
    """Absolute paths and name patterns to leave out of scans of `roots`.

    Temporary and cache directories and mounted pseudo or network file systems are left out, unless
    a root itself lies in one; our store and cache (`ours`) and what the user gave always. Where
    the whole file system is captured, everything mounted is left out: no install makes volumes.
    """
    home = os.path.expanduser("~")
    usual = [*_TEMPORARY, _temporary_folder(), *(os.path.join(home, c) for c in _CACHES)]
    usual += _mount_points(of_all_kinds="/" in roots)
    out = [os.path.abspath(path) for path in ours if path]
    out += [path for path in usual if not any(is_within(root, path) for root in roots)]
    return [*out, *given]


def _temporary_folder() -> str:
    """`tempfile.gettempdir()`, whose module takes longer to import than most starts can spare."""
    if not any(map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))) and os.access("/tmp", os.W_OK):
        return "/tmp"
    import tempfile

    return tempfile.gettempdir()


def _mount_points(*, of_all_kinds: bool) -> list[str]:
    """Where pseudo and network file systems are mounted, or file systems of all kinds; not "/"."""
    try:
        mounts = all_mounts()
    except (OSError, ValueError):
        return []
    return [m.target for m in mounts if m.target != "/" and (of_all_kinds or m.kind in _PSEUDO)]
