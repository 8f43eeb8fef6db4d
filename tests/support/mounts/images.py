"""Block images in a registry, and mounts of them that are gone afterwards for certain.

`publish` makes a stock image, its block image and hot sets of a dictionary of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.blockimage import artifact, filemap, hotset_manifest, pack_writer
from bootseer.blockimage.build import build
from bootseer.blockimage.tree_entries import Entry, Kind
from bootseer.blocks.table import TableSource
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import Descriptor, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import OCI_CONFIG, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.platforms import this_platform
from bootseer.storage.oci.repository import Repository
from tests.support import page_cache
from tests.support.mounts.fuse import own_mounts


@dataclasses.dataclass(frozen=True)
class Held:
    """Content for `build`: bytes in memory."""

    data: bytes
    segments: Sequence[tuple[int, int]] | None = None

    def chunks(self, size_bytes: int) -> Iterable[bytes]:
        for at in range(0, len(self.data), size_bytes):
            yield self.data[at : at + size_bytes]


def noise(size_bytes: int, seed: object = 0) -> bytes:
    """Bytes that hardly compress and are always the same."""
    return random.Random(str(seed)).randbytes(size_bytes)


def some_files(count: int = 40, size_bytes: int = 300_000) -> dict[str, bytes]:
    """Files of a few directories, none of a whole number of pages."""
    return {f"d{n % 5}/f{n:03}": noise(size_bytes + 13 * n, n) for n in range(count)}


def entries_of(files: Mapping[str, bytes]) -> list[Entry]:
    """Entries for `build`: the files and their directories."""
    folders = {""}
    for path in files:
        parts = path.split("/")[:-1]
        folders.update("/".join(parts[: n + 1]) for n in range(len(parts)))
    made = [Entry(path=f.encode(), kind=Kind.DIRECTORY, mode=0o755) for f in sorted(folders)]
    for path, data in sorted(files.items()):
        content = Held(data) if data else None
        made.append(
            Entry(path=path.encode(), kind=Kind.FILE, size_bytes=len(data), content=content)
        )
    return made


@dataclasses.dataclass(frozen=True)
class Published:
    """An image in a registry: its name, its digest, its files, its blobs' digests by type."""

    ref: str
    digest: str
    files: Mapping[str, bytes]
    folder: Path
    blobs: Mapping[str, str]
    packs: Mapping[str, str]
    hot_sets: Mapping[str, str]

    def data_offset(self, path: str) -> int:
        """Where a file begins in the raw data."""
        files = filemap.parse((self.folder / "files").read_bytes())
        return next(f.extents[0].data_offset for f in files.files if f.path == path.encode())


def publish(
    ref: str,
    files: Mapping[str, bytes],
    folder: Path,
    *,
    hot: Mapping[str, Sequence[str]] | None = None,
    block_image: bool = True,
) -> Published:
    """Push a stock image, its block image, and a hot set for each workload's list of paths."""
    folder.mkdir(parents=True, exist_ok=True)
    repository, reference = open_repository(ref, push=True)
    with repository:
        subject = _stock(repository, files, reference.version)
        if not block_image:
            return Published(ref, subject.digest, files, folder, {}, {}, {})
        built = build(entries_of(files), str(folder))
        made = artifact.pack(built, {"made": "by a test"})
        block = artifact.push(made, repository, subject)
        source = TableSource(built.table, repository.store, made.blobs[media_types.DATA].digest)
        packs, hot_sets = {}, {}
        for workload, paths in (hot or {}).items():
            trace = trace_of(built.files, paths, source, workload)
            packs[workload], hot_sets[workload] = push_hot_set(
                repository, subject, block, built, source, trace, folder
            )
    blobs = {kind: blob.digest for kind, blob in made.blobs.items()}
    return Published(ref, subject.digest, files, folder, blobs, packs, hot_sets)


def _stock(repository: Repository, files: Mapping[str, bytes], tag: str) -> Descriptor:
    here = this_platform()
    config = json.dumps({"architecture": here.architecture, "os": here.os}).encode()
    repository.push_blob(config, digest_of(config), len(config))
    layer = hashlib.sha256(repr(sorted(files)).encode()).hexdigest().encode()
    repository.push_blob(layer, digest_of(layer), len(layer))
    layers = [Descriptor("application/octet-stream", digest_of(layer), len(layer))]
    made = manifest_bytes(
        config=Descriptor(OCI_CONFIG, digest_of(config), len(config)), layers=layers
    )
    return repository.push_manifest(made, OCI_MANIFEST, tag)


def trace_of(
    files: filemap.FileMap, paths: Iterable[str], source: TableSource, workload: str
) -> Trace:
    """A trace of one start that read these files whole, in this order."""
    rows = {file.path.decode(): file for file in files.files}
    touched = []
    for number, path in enumerate(paths):
        for extent in rows[path].extents:
            end = -(-(extent.data_offset + extent.length) // 4096) * 4096
            start = extent.data_offset // 4096 * 4096
            length = min(end, source.size_bytes) - start
            touched.append(Touched(start, length, 50 * number, 1))
    return Trace(source.key, source.size_bytes, workload, 1, tuple(touched))


def push_hot_set(
    repository: Repository,
    subject: Descriptor,
    block: Descriptor,
    built: Any,
    source: TableSource,
    trace: Trace,
    folder: Path,
    *,
    files: filemap.FileMap | None = None,
) -> tuple[str, str]:
    """Pack and push; returns the digests of the pack and of the hot set's manifest."""

    def read_raw(offset: int, buffer: memoryview) -> None:
        from bootseer.blocks.fetch.fetcher import Fetcher

        with Fetcher() as fetcher:
            assert fetcher.read_into(source, offset, buffer) == len(buffer)

    path = folder / f"pack-{trace.workload}"
    with path.open("wb") as out:
        info = pack_writer.build_pack(
            trace,
            meta=Path(built.meta_path).read_bytes(),
            table=built.table.serialise(),
            key=source.key,
            block_bytes=source.block_bytes,
            files=files or built.files,
            read_raw=read_raw,
            out=out,
        )
    repository.push_blob(str(path), info.digest, info.size_bytes)
    repository.push_blob(b"{}", digest_of(b"{}"), 2)
    pack = Descriptor(media_types.PACK, info.digest, info.size_bytes)
    hot = hotset_manifest.HotSet(
        trace.workload,
        block.digest,
        hotset_manifest.now(),
        trace.starts,
        pack,
        info.boot_length,
        info.boot_digest,
        None,
    )
    pushed = repository.push_manifest(hotset_manifest.manifest_of(hot, subject), OCI_MANIFEST)
    return info.digest, pushed.digest


class Mounts:
    """Mounts of one test: `mount` in a child process, everything gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "runtime"
        self.cache = folder / "cache"
        self._count = 0

    def settings(self, ref: str, **options: Any) -> MountSettings:
        if "directory" not in options:
            self._count += 1
            directory = self.folder / f"mnt{self._count}"
            directory.mkdir()
            options["directory"] = str(directory)
        given = {
            "cache": str(self.cache),
            "runtime": str(self.runtime),
            "fill": False,
            "record": False,
            "log_file": str(self.folder / "log"),
            **options,
        }
        return MountSettings(ref=ref, **given)

    def mount(self, ref: str, **options: Any) -> MountedImage:
        return mounting.mount(self.settings(ref, **options))

    def umount(self, mounted: MountedImage | str, **options: Any) -> None:
        directory = mounted if isinstance(mounted, str) else mounted.directory
        mounting.umount(directory, runtime_dir=str(self.runtime), **options)

    def server(self, index: int = 0) -> server_registry.ServerRecord:
        return server_registry.list_servers(str(self.runtime))[index]

    def worker(self, server: server_registry.ServerRecord) -> int:
        """The process that serves."""
        children = Path(f"/proc/{server.supervisor}/task/{server.supervisor}/children")
        return int(children.read_text().split()[0])

    def kill_worker(self, server: server_registry.ServerRecord) -> None:
        """Kill the process that serves, and wait until another one has taken its place."""
        killed = self.worker(server)
        os.kill(killed, signal.SIGKILL)
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with contextlib.suppress(IndexError):
                if self.worker(server) != killed:
                    assert f"worker {killed} of" in self.log
                    return
            time.sleep(0.005)
        raise AssertionError("no server took over")

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[int]:
        """Servers that hold a lock below our runtime directory."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    link = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if link.startswith(f"{self.runtime}/") and link.endswith("/lock"):
                        found.append(int(pid))
                        break
        return [pid for pid in found if pid != os.getpid()]

    def left(self) -> list[str]:
        """Whatever is still there of any mount or server."""
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line for line in file if str(self.folder) in line]
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.runtime / "images")
            mounts += [
                name
                for name in names
                if not name.startswith("agent") and not name.endswith(".lock")
            ]
        return mounts + [f"process {pid}" for pid in self.processes()]

    def gone(self, timeout_s: float = 20.0) -> bool:
        """Wait until nothing is left."""
        end_s = time.monotonic() + timeout_s
        while self.left():
            if time.monotonic() > end_s:
                print(self.left(), self.log, *map(_about, self.processes()), sep="\n")
                return False
            server_registry.list_servers(str(self.runtime))
            time.sleep(0.05)  # to look takes milliseconds of its own
        return True

    def clear(self) -> None:
        """Take everything away."""
        for _ in range(20):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
                targets = [line.split()[4] for line in file if f" {self.folder}/" in line]
            for target in reversed(targets):
                ctypes.CDLL(None).umount2(os.fsencode(target), 3)
            if not targets and not self.processes():
                return
            time.sleep(0.05)


def begun_with(variable: str) -> list[int]:
    """Processes in whose environment a variable (`NAME=value`) was given, and those they began."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def _about(pid: int) -> str:
    """What the threads of a process do, for who reads why a test failed."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    said = [f"{(t / 'comm').read_text().strip()}: {(t / 'wchan').read_text()}" for t in tasks]
    return f"process {pid}: {', '.join(said)}"


@contextlib.contextmanager
def mounts_below(folder: Path) -> Iterator[Mounts]:
    """Mounts for one test; processes, mounts and folders are gone afterwards.

    In a mount namespace of this thread and its children: whoever else makes one on this machine,
    a container above all, would copy our mounts, and keep their servers for as long as it lives.
    """
    made = Mounts(folder)
    with own_mounts():
        try:
            yield made
        finally:
            made.clear()


def tree_of(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """All files below a directory with their bytes; read in a process that may be lost."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found


def evict(directory: str) -> None:
    """Drop the page cache of everything (the whole machine's: there is no narrower way)."""
    page_cache.drop()


def unread_bytes(host: str) -> int:
    """What clients have sent to a server of 127.0.0.1 that it has not read yet."""
    local = f"0100007F:{int(host.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4] for row in rows if (row[1], row[3]) == (local, "01")]  # established
    return sum(int(queue.partition(":")[2], 16) for queue in queues)
