"""Our sides of the depsnap benchmark, and the limit, each as a program timed from outside.

`restore ARCHIVE DIGEST ROOT TARGET`, `tree CACHE DIGEST ROOT TARGET`: what a start would do.
`limit SOURCE TARGET JOBS`: create the same files from memory; prints its own seconds, since
reading them first does not count.
"""

from __future__ import annotations

import os
import sys
import time


def restore(archive: str, digest: str, root: str, target: str) -> None:
    from bootseer.depsnap.restore.archive_restore import restore as run
    from bootseer.depsnap.types import Digest

    run(archive, Digest(digest), {root: target})


def place(cache: str, digest: str, root: str, target: str) -> None:
    from bootseer.depsnap.shared_tree import cache as treecache
    from bootseer.depsnap.shared_tree import forms
    from bootseer.depsnap.types import Digest

    found = treecache.find(cache, Digest(digest))
    assert found is not None, "the tree was modified"
    forms.place(found, {root: target})


def limit(source: str, target: str, jobs: int) -> None:
    """The same directories, files, modes and times, written by `jobs` processes at once."""
    folders: list[str] = []
    files: list[tuple[str, int, int, bytes]] = []
    links: list[tuple[str, str]] = []
    for folder, names, leaves in os.walk(source):
        base = os.path.relpath(folder, source)
        folders.append(base)
        for name in [*names, *leaves]:
            path = os.path.join(folder, name)
            relative = os.path.normpath(os.path.join(base, name))
            if os.path.islink(path):
                links.append((relative, os.readlink(path)))
            elif name in leaves:
                status = os.stat(path)
                with open(path, "rb") as file:
                    files.append(
                        (relative, status.st_mode & 0o777, status.st_mtime_ns, file.read())
                    )
    os.sync()
    start = time.perf_counter()
    os.umask(0)
    for relative in folders:
        os.makedirs(os.path.join(target, relative), exist_ok=True)
    _write_all(target, files, jobs)
    for relative, text in links:
        os.symlink(text, os.path.join(target, relative))
    print(time.perf_counter() - start)


def _write_all(target: str, files: list[tuple[str, int, int, bytes]], jobs: int) -> None:
    # Runs of neighbours, of about equal bytes: each process mostly has its directories to itself.
    shares: list[list[tuple[str, int, int, bytes]]] = [[] for _ in range(jobs)]
    size, run = 0, 0
    for file in files:
        shares[run % jobs].append(file)
        size += len(file[3])
        if size > 4 << 20:
            size, run = 0, run + 1
    pids = []
    for share in shares:
        pid = os.fork()
        if pid == 0:
            for relative, mode, mtime_ns, data in share:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                descriptor = os.open(os.path.join(target, relative), flags, mode)
                os.write(descriptor, data)
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
                os.close(descriptor)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "restore":
        restore(words[0], words[1], words[2], words[3])
    elif what == "tree":
        place(words[0], words[1], words[2], words[3])
    else:
        limit(words[0], words[1], int(words[2]))


if __name__ == "__main__":
    main()
