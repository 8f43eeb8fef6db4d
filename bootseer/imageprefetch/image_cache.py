"""What this node keeps of images, so that they can be mounted again with their registry gone.

`<cache>/images/pins/<name>` says which digest a name had when it was last looked up.
`<cache>/images/<digest>/` belongs to one image: `image.json` (written last, and believed only
with files that have the digests it names), EROFS metadata, block table, and per workload the
pack. Files are named after their content and never changed: what is mounted keeps its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BootseerError, NoSpaceError, from_os_error
from bootseer.light_dataclasses import dataclass
from bootseer.system.atomic import Draft, replace_file

VERSION = 1
_MOST_BYTES = 1 << 20  # of a JSON file
_IMAGE = "image.json"
_FETCHED = ("meta", "table", "pack", "files")
DEFAULT_NAME = "_default"  # file or folder of the workload ""; no other can be called so
_HOT_SETS, _OWN = "hotsets", "own"  # folders of an image
_PACK_AGE_S = 24 * 3600.0
LIMIT_BYTES = 16 << 30
UNUSED_S = 30 * 24 * 3600.0  # after that an image that was not mounted is fetched again
_CLOCK_SET_S = 1577836800.0  # 2020: whatever is older was dated by a clock that nobody had set


@dataclass(frozen=True, slots=True)
class KeptPack:
    """A workload's pack: its blob's digest and size, and where its frames begin."""

    digest: str
    size_bytes: int
    boot_length: int
    boot_digest: str


@dataclass(frozen=True, slots=True)
class KeptImage:
    """What `image.json` says. Digests are `sha256:…` of the raw bytes that files here have."""

    block_image: str
    data: str
    data_bytes: int
    meta: str
    table: str
    packs: dict[str, KeptPack] = dataclasses.field(default_factory=dict)


CONDEMNED_S = 3600.0
"""How long a block image that gave wrong bytes is not mounted; the registry may be mended."""


def _certainly(_: str) -> AbstractContextManager[bool]:
    return contextlib.nullcontext(True)


class ImageCache:
    """One node's `images` folder. Reading raises nothing: what is damaged is not there."""

    def __init__(self, cache_dir: str) -> None:
        self.folder = os.path.join(cache_dir, "images")

    def folder_of(self, digest: str) -> str:
        """Where one image's files are."""
        return os.path.join(self.folder, digest.replace(":", "-"))

    def trace_folder(self, digest: str) -> str:
        """Where the traces of one image's starts are."""
        return os.path.join(self.folder_of(digest), "traces")

    def hot_set_folder(self, digest: str) -> str:
        """Where the hot sets of one image are that were built by command."""
        return os.path.join(self.folder_of(digest), _HOT_SETS)

    def own_hot_set_folder(self, digest: str) -> str:
        """Where the hot sets of one image are that this node made for itself."""
        return os.path.join(self.folder_of(digest), _OWN)

    def fill_lock(self, digest: str) -> str:
        """What a server of this image holds while it fetches all that nobody asked for."""
        return os.path.join(self.folder_of(digest), "fill.lock")

    # --- names ---------------------------------------------------------------------------

    def _pin(self, name: str) -> str:
        return os.path.join(self.folder, "pins", hashlib.sha256(name.encode()).hexdigest())

    def pinned(self, name: str) -> str:
        """The digest that a name had; "" where it was never looked up."""
        found = _read_json(self._pin(name))
        return str(found.get("digest", "")) if found.get("name") == name else ""

    def pin(self, name: str, digest: str) -> None:
        """Remember what a name stands for; raises NoSpaceError and the like."""
        if self.pinned(name) != digest:
            _write(self._pin(name), json.dumps({"name": name, "digest": digest}).encode())

    # --- damage --------------------------------------------------------------------------

    def condemn(self, digest: str, block_image: str) -> None:
        """Remember that a block image's bytes are wrong wherever they come from."""
        with contextlib.suppress(BootseerError):  # then the next mount finds out by itself
            _write(self._damaged(digest), json.dumps({"block_image": block_image}).encode())

    def condemned(self, digest: str) -> str:
        """The block image that was found wrong within `CONDEMNED_S`; "" for none."""
        path = self._damaged(digest)
        try:
            old = not 0 <= time.time() - os.stat(path).st_mtime < CONDEMNED_S
        except OSError:
            return ""
        return "" if old else str(_read_json(path).get("block_image", ""))

    def _damaged(self, digest: str) -> str:
        return os.path.join(self.folder_of(digest), "damaged")

    # --- images --------------------------------------------------------------------------

    def image(self, digest: str) -> KeptImage | None:
        """What is kept of an image, whole enough to mount it."""
        found = _read_json(os.path.join(self.folder_of(digest), _IMAGE))
        if found.get("version") != VERSION:
            return None
        try:
            packs = {name: KeptPack(**pack) for name, pack in found["packs"].items()}
            fields = {name: found[name] for name in KeptImage.__match_args__}
            return KeptImage(**{**fields, "packs": packs})
        except (AttributeError, KeyError, TypeError):
            return None

    def keep_image(self, digest: str, image: KeptImage) -> None:
        """Say what is kept; the files must be there. Raises NoSpaceError and the like."""
        body = {"version": VERSION, **dataclasses.asdict(image)}
        path = os.path.join(self.folder_of(digest), _IMAGE)
        _write(path, json.dumps(body).encode())

    def path(self, digest: str, kind: str, content: str) -> str:
        """The file of one image that holds `content`, a digest."""
        name = f"{kind}-{content.partition(':')[2]}"
        return os.path.join(self.folder_of(digest), name)

    def has(self, digest: str, kind: str, content: str) -> bytes | None:
        """A small file's bytes, if it is there and they have its digest."""
        try:
            with open(self.path(digest, kind, content), "rb") as file:
                data = file.read()
        except OSError:
            return None
        good = f"sha256:{hashlib.sha256(data).hexdigest()}" == content
        return data if good else None

    def keep(self, digest: str, kind: str, content: str, data: bytes | memoryview) -> str:
        """Write a file that holds `content`; returns its path. Raises NoSpaceError and the like."""
        path = self.path(digest, kind, content)
        _write(path, data)
        return path

    def clean(self, digest: str, keep: KeptImage) -> None:
        """Remove an image's files that `keep` does not name, and temporaries that are old."""
        folder = self.folder_of(digest)
        named = {keep.meta, keep.table} | {pack.digest for pack in keep.packs.values()}
        wanted = {one.partition(":")[2] for one in named}
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                kind, _, content = entry.name.partition("-")
                old = time.time() - entry.stat().st_mtime > _PACK_AGE_S
                unknown = kind in ("meta", "table", "pack") and content not in wanted
                if entry.is_file() and old and (unknown or entry.name.startswith(".")):
                    os.unlink(entry.path)

    def used(self, digest: str) -> None:
        """Remember that an image was mounted now."""
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.folder_of(digest), _IMAGE))

    def expire(
        self,
        in_use: Iterable[str] = (),
        unused_s: float = UNUSED_S,
        limit_bytes: int = LIMIT_BYTES,
        unused: Callable[[str], AbstractContextManager[bool]] = _certainly,
    ) -> None:
        """Remove what was fetched of images that nobody mounted for so long; nothing raises.

        Then that of those that were not mounted for longest, until all of it together has
        `limit_bytes` at most. Traces, and hot sets that were built by command, stay; and all of
        the images `in_use` (digests), which count. `unused` is asked before one is removed, and
        keeps it from being mounted meanwhile.
        """
        stay = {self.folder_of(digest) for digest in in_use}
        rows = []
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    rows.append((_used_s(folder.path), folder.path, _fetched_bytes(folder.path)))
        left_bytes = sum(size for _, _, size in rows)
        for used_s, path, size in sorted(rows):
            old = time.time() - used_s > unused_s
            if path not in stay and (old or left_bytes > limit_bytes):
                digest = os.path.basename(path).replace("-", ":", 1)
                with contextlib.suppress(OSError), unused(digest) as free:
                    if free:
                        _remove_fetched(path)
                        left_bytes -= size

    def forget(self, digest: str) -> None:
        """Remove all that is kept of an image, its traces too."""
        import shutil  # milliseconds, which a mount shall not wait for

        shutil.rmtree(self.folder_of(digest), ignore_errors=True)


def _used_s(folder: str) -> float:
    """When an image was mounted last; now, where the clock was not set yet at that time."""
    path = os.path.join(folder, _IMAGE)
    used_s = os.stat(path).st_mtime
    if used_s >= _CLOCK_SET_S:
        return used_s
    os.utime(path)
    return time.time()


def _fetched_bytes(folder: str) -> int:
    """What `_remove_fetched` would free."""
    found = 0
    for place, _, names in os.walk(folder):
        own = os.path.relpath(place, folder).split(os.sep)[0] == _OWN
        for name in names:
            if own or (place == folder and name.partition("-")[0] in _FETCHED):
                with contextlib.suppress(OSError):
                    found += os.lstat(os.path.join(place, name)).st_size
    return found


def _remove_fetched(folder: str) -> None:
    import shutil

    os.unlink(os.path.join(folder, _IMAGE))
    for entry in os.scandir(folder):
        if entry.name.partition("-")[0] in _FETCHED and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)
        elif entry.name == _OWN and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


class CachedFrames:
    """A pack's frames from a file of this node: `FrameStream`."""

    def __init__(self, path: str, pack: KeptPack) -> None:
        self._path = path
        self._file = io.FileIO(path, "rb")
        try:
            if os.fstat(self._file.fileno()).st_size != pack.size_bytes:
                raise FileNotFoundError(path)  # cut: as good as none
            self._file.seek(pack.boot_length)
        except OSError:
            self._file.close()
            raise

    def boot(self, pack: KeptPack) -> bytes:
        """The bytes before the frames, unverified."""
        return os.pread(self._file.fileno(), pack.boot_length, 0)

    def readinto(self, view: memoryview, /) -> int:
        return self._file.readinto(view)

    def spoil(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CachedFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ByteStream(Protocol):
    """Bytes from elsewhere, one after the other."""

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end."""

    def close(self) -> None:
        """Let go of it."""


class CachingFrames:
    """Frames from elsewhere that are written to a file as they pass: `FrameStream`.

    The file gets its name when all bytes have passed; what is wrong with it, a full disk above
    all, ends the keeping and nothing else.
    """

    def __init__(self, stream: ByteStream, path: str, boot: bytes, pack: KeptPack) -> None:
        self._stream, self._path, self._size_bytes = stream, path, pack.size_bytes
        self._draft: Draft | None = None
        self._done_bytes = len(boot)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._draft = Draft(path, mode=0o600, prefix=".pack-")
            self._draft.write(boot)
        except OSError:
            self._abandon()

    def readinto(self, view: memoryview, /) -> int:
        count = self._stream.readinto(view)
        if self._draft is not None:
            try:
                self._draft.write(view[:count])
                self._done_bytes += count
                if self._done_bytes == self._size_bytes:
                    self._draft.publish(sync=False)  # whoever reads it checks its digests
                    self._draft = None
            except OSError:
                self._abandon()
        return count

    def spoil(self) -> None:
        self._abandon()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _abandon(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()

    def close(self) -> None:
        self._abandon()
        self._stream.close()

    def __enter__(self) -> CachingFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: str, data: bytes | memoryview) -> None:
    """Publish a file. Not synced: whoever reads it checks its digest."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, data, mode=0o600, prefix=".new-", sync=False)
    except OSError as error:
        raise from_os_error(error, f"keep {path}") from error


__all__ = ["CachedFrames", "CachingFrames", "ImageCache", "KeptImage", "KeptPack", "NoSpaceError"]
