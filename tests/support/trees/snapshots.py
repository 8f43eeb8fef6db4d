"""Directory trees for the snapshot tests: make rich ones, and describe any exactly."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.types import ArchiveInfo

NS = 1_600_000_000_123_456_789


def describe(root: str | Path, *, times: bool = True) -> dict[str, tuple]:
    """Everything a restore must bring back, by path; hard links as the set of their paths."""
    out: dict[str, tuple] = {}
    inodes: dict[tuple[int, int], list[str]] = {}
    root = os.fspath(root)
    for folder, folders, files in os.walk(root):
        for name in [".", *folders, *files] if folder == root else [*folders, *files]:
            path = os.path.normpath(os.path.join(folder, name))
            s = os.lstat(path)
            relative = os.path.relpath(path, root)
            what: tuple = (stat.filemode(s.st_mode), s.st_uid, s.st_gid)
            if times:
                what += (s.st_mtime_ns,)
            if stat.S_ISLNK(s.st_mode):
                what += (os.readlink(path),)
            else:
                what += tuple((n, os.getxattr(path, n)) for n in sorted(os.listxattr(path)))
            if stat.S_ISREG(s.st_mode):
                what += (hashlib.sha256(Path(path).read_bytes()).hexdigest(),)
                inodes.setdefault((s.st_dev, s.st_ino), []).append(relative)
            out[relative] = what
    for paths in inodes.values():
        if len(paths) > 1:
            for path in paths:
                out[path] += (tuple(sorted(paths)),)
    return out


def as_shared(described: dict[str, tuple]) -> dict[str, tuple]:
    """What a node-shared tree shows of it: that of a plain user, whom no read-only mount helps,
    has no permission to write."""
    if os.geteuid() == 0:
        return described
    return {path: (what[0].replace("w", "-"), *what[1:]) for path, what in described.items()}


# Nobody but root can change what is in a directory that its owner may not write in.
MERGEABLE = 0o555 if os.geteuid() == 0 else 0o755


def write(path: Path, data: bytes | str = b"", *, mode: int = 0o644, mtime_ns: int = NS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def rich(root: Path, *, shut: int = 0o555) -> Path:
    """One of everything: odd names, links, modes, ns times, attributes, holes, a large file."""
    root.mkdir(parents=True)
    write(root / "bin/tool", b"#!/bin/sh\nexit 0\n", mode=0o755)
    write(root / "bin/empty")
    os.link(root / "bin/tool", root / "bin/tool-too")
    (root / "bin/python").symlink_to("/usr/bin/python3")
    (root / "dangling").symlink_to("no/such")
    write(root / "lib/a.py", "x = 1\n", mtime_ns=NS + 1)
    write(root / "lib/b.so", os.urandom(300_000), mode=0o555)
    write(root / "lib/big.bin", os.urandom(9 << 20))
    write(root / ("lib/" + "n" * 200 + "/" + "m" * 120), "long")
    write(root / "lib/ünï cödé", "name")
    write(Path(os.fsdecode(os.fsencode(root) + b"/lib/\xff\xfe\n bytes")), "not utf-8")
    os.setxattr(root / "lib/a.py", "user.note", b"\x00\xff=%\n")
    with (root / "sparse").open("wb") as file:
        file.truncate(40 << 20)
        file.seek(13 << 20)
        file.write(b"data" * 5000)
    with (root / "hole").open("wb") as file:
        file.truncate(5 << 20)
    write(root / "old", "before 1970", mtime_ns=-1_000_000_001)
    (root / "shut").mkdir()
    write(root / "shut/inside", "x")
    (root / "shut").chmod(shut)
    (root / "empty dir").mkdir()
    for folder, _, _ in os.walk(root, topdown=False):
        os.utime(folder, ns=(NS, NS + 7))
    return root


def pack(root: Path, path: Path, **options: int) -> ArchiveInfo:
    """An archive of the whole tree at `root`."""
    return archive.create(str(path), [RootDelta.of_tree(scan.scan(str(root)))], **options)


def leftovers(folder: Path) -> list[str]:
    """Staging places that somebody forgot below `folder`."""
    return [str(p) for p in folder.rglob(".bootseer-*")]
