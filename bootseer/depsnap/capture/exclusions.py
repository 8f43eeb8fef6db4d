"""What is captured: scans of the roots before and after, and what is left out of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta, Tree
from bootseer.system.mountinfo import all_mounts
from bootseer.system.paths import is_within

# Kernel file systems and such whose contents mean nothing elsewhere.
_PSEUDO_NAMES = (
    "proc sysfs devtmpfs devpts tmpfs cgroup cgroup2 mqueue debugfs tracefs securityfs pstore "
    "bpf configfs fusectl hugetlbfs ramfs binfmt_misc autofs nsfs efivarfs rpc_pipefs "
    "nfs nfs4 cifs ceph lustre fuse.sshfs"
)
PSEUDO = frozenset(_PSEUDO_NAMES.split())
TEMPORARY = ("/tmp", "/var/tmp", "/var/cache", "/var/log", "/run", "/proc", "/sys", "/dev")
CACHES = (".cache", ".npm/_cacache")


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """What an install did to its roots. `fresh` are the roots that were not there before."""

    deltas: tuple[RootDelta, ...]
    fresh: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not any(d.entries or d.deleted for d in self.deltas)


def excludes(roots: Sequence[str], ours: Sequence[str], given: Sequence[str]) -> list[str]:
    """Absolute paths and name patterns to leave out.

    Temporary and cache directories and mounted pseudo or network file systems go, unless a root
    itself lies in one; our store and cache go always. Where the whole root is captured, everything
    mounted goes: volumes of data are none of an install's business.
    """
    home = os.path.expanduser("~")
    hidden = [*TEMPORARY, _temporary(), *(os.path.join(home, c) for c in CACHES)]
    out = [os.path.abspath(p) for p in ours if p]
    hidden += _mounts(every="/" in roots)
    out += [path for path in hidden if not any(is_within(root, path) for root in roots)]
    return [*out, *given]


def _temporary() -> str:
    """`tempfile.gettempdir()`, whose module takes longer to import than most starts can spare."""
    if not any(map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))) and os.access("/tmp", os.W_OK):
        return "/tmp"
    import tempfile

    return tempfile.gettempdir()


def _mounts(*, every: bool) -> list[str]:
    """Mount points of pseudo and network file systems; with `every`, all but the root's own."""
    try:
        mounts = all_mounts()
    except (OSError, ValueError):
        return []
    return [m.target for m in mounts if m.target != "/" and (every or m.kind in PSEUDO)]


def before(roots: Sequence[str], exclude: Sequence[str]) -> list[Tree]:
    """Scan every root; one that is not there yet gives an empty tree."""
    return [scan.scan(root, exclude=exclude) for root in roots]


def after(trees: Sequence[Tree], exclude: Sequence[str]) -> Captured:
    """Scan again and tell what changed in each root."""
    deltas, fresh = [], []
    for old in trees:
        new = scan.scan(old.root, exclude=exclude)
        if not old.entries:
            fresh.append(old.root)
            deltas.append(RootDelta.of_tree(new))
            continue
        delta = scan.diff(old, new)
        if not delta.empty:
            deltas.append(RootDelta.of_delta(delta))
    return Captured(tuple(d for d in deltas if d.entries or d.deleted), tuple(fresh))
