"""The node's cache of images, from which they can be mounted while their registry is away.

`<cache>/images/pins/<name>` has the digest that a name had when it was last looked up.
`<cache>/images/<digest>/` belongs to one image: EROFS metadata, block table, config, a pack for
each workload, and `image.json`, which is written last and valid only together with files of the
digests that it names. Files are named after their content and never changed, so a mounted image
keeps its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from bootseer import light_dataclasses as dataclasses
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, from_os_error
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.manifest import Manifest, digest_of, parse_manifest
from bootseer.system.atomic import Draft, replace_file

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor
    from bootseer.storage.oci.repository import RepositoryReader

VERSION = 1
_MOST_BYTES = 1 << 20  # of a JSON file
_IMAGE, _ASKED = "image.json", "asked"
_FETCHED = ("meta", "table", "pack", "files")
BLOCKS, IMAGES = "blocks", "images"
"""The cache directory's folders of blocks (see `blocks.cache`) and of images."""
_HOT_SETS, _OWN = "hotsets", "own"  # folders of an image
_PACK_AGE_S = 24 * 3600.0
LIMIT_BYTES = 16 << 30
UNUSED_S = 30 * 24 * 3600.0  # what was not mounted for so long is removed
_CLOCK_SET_S = 1577836800.0  # 2020: an older time is of a clock that had not been set
CONDEMNED_S = 3600.0
"""How long a block image that gave wrong bytes is not mounted; the registry may be repaired."""
FRESH_S = 3600.0
"""How long it holds what the registry said of an image besides its name's digest."""
CONFIG = "config"
"""The kind of the files that hold an image's manifest and config."""


@dataclass(frozen=True, slots=True)
class KeptPack:
    """A workload's pack: its blob's digest and size, and the boot part before its frames."""

    digest: str
    size_bytes: int
    boot_length: int
    boot_digest: str


@dataclass(frozen=True, slots=True)
class KeptImage:
    """The content of `image.json`. Digests are `sha256:…` of the files' raw bytes."""

    block_image: str
    data: str
    data_bytes: int
    meta: str
    table: str
    packs: dict[str, KeptPack] = dataclasses.field(default_factory=dict)


def _always(_: str) -> AbstractContextManager[bool]:
    return contextlib.nullcontext(True)


class ImageCache:
    """The `images` folder of a node's cache. Reading never raises: damaged means not there."""

    def __init__(self, cache_dir: str) -> None:
        self.folder = os.path.join(cache_dir, IMAGES)

    def folder_of(self, digest: str) -> str:
        """The folder of one image."""
        return os.path.join(self.folder, digest.replace(":", "-"))

    def trace_folder(self, digest: str) -> str:
        """The folder of the traces of one image's starts."""
        return os.path.join(self.folder_of(digest), "traces")

    def hot_set_folder(self, digest: str) -> str:
        """The folder of one image's hot sets that were built by command."""
        return os.path.join(self.folder_of(digest), _HOT_SETS)

    def own_hot_set_folder(self, digest: str) -> str:
        """The folder of one image's hot sets that this node made for itself."""
        return os.path.join(self.folder_of(digest), _OWN)

    def fill_lock(self, digest: str) -> str:
        """The lock file that a server holds while it fills the image in the background."""
        return os.path.join(self.folder_of(digest), "fill.lock")

    # --- names ---------------------------------------------------------------------------

    def _pin_path(self, name: str) -> str:
        return os.path.join(self.folder, "pins", digest_of(name.encode()).partition(":")[2])

    def read_pin(self, name: str) -> str:
        """The digest that a name had; "" where it was never looked up."""
        pin = _read_json(self._pin_path(name))
        return str(pin.get("digest", "")) if pin.get("name") == name else ""

    def pin(self, name: str, digest: str) -> None:
        """Remember what a name stands for; raises NoSpaceError and the like."""
        if self.read_pin(name) != digest:
            _write(self._pin_path(name), json.dumps({"name": name, "digest": digest}).encode())

    def list_pins(self) -> list[tuple[str, str]]:
        """The names that were looked up, with the digests that they had."""
        folder = os.path.join(self.folder, "pins")
        with contextlib.suppress(OSError):
            documents = [_read_json(os.path.join(folder, name)) for name in os.listdir(folder)]
            return [(str(d["name"]), str(d["digest"])) for d in documents if "digest" in d]
        return []

    # --- damage --------------------------------------------------------------------------

    def condemn(self, digest: str, block_image: str) -> None:
        """Remember that a block image's bytes are wrong at their source."""
        with contextlib.suppress(BootseerError):  # then the next mount finds out by itself
            _write(self._damage_path(digest), json.dumps({"block_image": block_image}).encode())

    def find_condemned(self, digest: str) -> str:
        """The block image that was found wrong within `CONDEMNED_S`; "" for none."""
        path = self._damage_path(digest)
        try:
            is_over = not 0 <= time.time() - os.stat(path).st_mtime < CONDEMNED_S
        except OSError:
            return ""
        return "" if is_over else str(_read_json(path).get("block_image", ""))

    def _damage_path(self, digest: str) -> str:
        return os.path.join(self.folder_of(digest), "damaged")

    # --- images --------------------------------------------------------------------------

    def image(self, digest: str) -> KeptImage | None:
        """What is kept of an image; None where that is not enough to mount it."""
        document = _read_json(os.path.join(self.folder_of(digest), _IMAGE))
        if document.get("version") != VERSION:
            return None
        try:
            packs = {name: KeptPack(**pack) for name, pack in document["packs"].items()}
            fields = {name: document[name] for name in KeptImage.__match_args__}
            return KeptImage(**{**fields, "packs": packs})
        except (AttributeError, KeyError, TypeError):
            return None

    def keep_image(self, digest: str, image: KeptImage) -> None:
        """Write `image.json`, after the files it names. Raises NoSpaceError and the like."""
        body = {"version": VERSION, **dataclasses.asdict(image)}
        path = os.path.join(self.folder_of(digest), _IMAGE)
        _write(path, json.dumps(body).encode())

    def path(self, digest: str, kind: str, content: str) -> str:
        """The file of one image that holds the bytes of the digest `content`."""
        name = f"{kind}-{content.partition(':')[2]}"
        return os.path.join(self.folder_of(digest), name)

    def read(self, digest: str, kind: str, content: str) -> bytes | None:
        """A small file's bytes, if it is there and they have the digest `content`."""
        try:
            with open(self.path(digest, kind, content), "rb") as file:
                data = file.read()
        except OSError:
            return None
        return data if digest_of(data) == content else None

    def keep(self, digest: str, kind: str, content: str, data: bytes | memoryview) -> str:
        """Write the file of the digest `content`, and return its path.

        Raises NoSpaceError and the like.
        """
        path = self.path(digest, kind, content)
        _write(path, data)
        return path

    def config(self, digest: str) -> bytes | None:
        """The config of an image, if it is kept."""
        raw = self.read(digest, CONFIG, digest)
        manifest = parse_manifest(raw) if raw is not None else None
        if not isinstance(manifest, Manifest):
            return None
        return self.read(digest, CONFIG, manifest.config.digest)

    def fetch_config(
        self, repository: RepositoryReader, image: Descriptor, manifest: Manifest
    ) -> bytes:
        """Fetch and keep the config of an image. Raises what the repository raises."""
        from bootseer.storage.oci.config import LIMIT_BYTES

        raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
        with contextlib.suppress(BootseerError):  # a full disk: it is fetched again next time
            self.keep(image.digest, CONFIG, manifest.config.digest, raw)
            self.keep(image.digest, CONFIG, image.digest, manifest.raw)
        return raw

    def clean(self, digest: str, keep: KeptImage) -> None:
        """Remove an image's files that `keep` does not name, and temporaries that are old."""
        folder = self.folder_of(digest)
        named = {keep.meta, keep.table} | {pack.digest for pack in keep.packs.values()}
        wanted = {content.partition(":")[2] for content in named}
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                kind, _, content = entry.name.partition("-")
                is_old = time.time() - entry.stat().st_mtime > _PACK_AGE_S
                is_unknown = kind in ("meta", "table", "pack") and content not in wanted
                if entry.is_file() and is_old and (is_unknown or entry.name.startswith(".")):
                    os.unlink(entry.path)

    def mark_asked(self, digest: str, workload: str) -> None:
        """Remember that the registry has said now what is kept of an image for a workload."""
        with contextlib.suppress(BootseerError):
            _write(self._asked_path(digest, workload), b"")

    def forget_asked(self, digest: str, workload: str) -> None:
        """Have the registry asked again."""
        with contextlib.suppress(OSError):
            os.unlink(self._asked_path(digest, workload))

    def is_fresh(self, digest: str, workload: str) -> bool:
        """Whether the registry has said so within `FRESH_S`."""
        try:
            asked_s = os.stat(self._asked_path(digest, workload)).st_mtime
        except OSError:
            return False
        return 0 <= time.time() - asked_s < FRESH_S

    def _asked_path(self, digest: str, workload: str) -> str:
        name = digest_of(workload.encode()).partition(":")[2][:16]
        return os.path.join(self.folder_of(digest), f"{_ASKED}-{name}")

    def mark_used(self, digest: str) -> None:
        """Remember that an image is mounted now."""
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.folder_of(digest), _IMAGE))

    def expire(
        self,
        in_use: Iterable[str] = (),
        unused_s: float = UNUSED_S,
        limit_bytes: int = LIMIT_BYTES,
        lock_unused: Callable[[str], AbstractContextManager[bool]] = _always,
    ) -> None:
        """Remove what was fetched of images that were not mounted for `unused_s`; nothing raises.

        Then of those least recently mounted, until everything together takes `limit_bytes` at
        most. Traces, and hot sets that were built by command, stay. So does everything of the
        images `in_use` (digests), which count. `lock_unused(digest)` is entered before one is
        removed: it gives whether the image is unused, and keeps it from being mounted meanwhile.
        """
        stay = {self.folder_of(digest) for digest in in_use}
        candidates = []
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    used_s = _used_s(folder.path)  # raises for what is no image's
                    candidates.append((used_s, folder.path, _fetched_bytes(folder.path)))
        left_bytes = sum(size_bytes for _, _, size_bytes in candidates)
        for used_s, path, size_bytes in sorted(candidates):
            is_old = time.time() - used_s > unused_s
            if path not in stay and (is_old or left_bytes > limit_bytes):
                digest = os.path.basename(path).replace("-", ":", 1)
                with contextlib.suppress(OSError), lock_unused(digest) as is_unused:
                    if is_unused:
                        _remove_fetched(path)
                        left_bytes -= size_bytes

    def forget(self, digest: str) -> None:
        """Remove all that is kept of an image, its traces too."""
        import shutil  # takes milliseconds, which a mount would wait for

        shutil.rmtree(self.folder_of(digest), ignore_errors=True)


def _used_s(folder: str) -> float:
    """When an image was mounted last; now, if the clock had not been set yet at that time."""
    path = os.path.join(folder, _IMAGE)
    used_s = os.stat(path).st_mtime
    if used_s >= _CLOCK_SET_S:
        return used_s
    os.utime(path)
    return time.time()


def _fetched_bytes(folder: str) -> int:
    """How much `_remove_fetched` would free."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        is_own = os.path.relpath(parent, folder).split(os.sep)[0] == _OWN
        for name in names:
            if is_own or (parent == folder and name.partition("-")[0] in _FETCHED):
                with contextlib.suppress(OSError):
                    total_bytes += os.lstat(os.path.join(parent, name)).st_size
    return total_bytes


def _remove_fetched(folder: str) -> None:
    import shutil

    os.unlink(os.path.join(folder, _IMAGE))
    for entry in os.scandir(folder):
        if entry.name.partition("-")[0] in _FETCHED and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)
        elif entry.name == _OWN and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


class CachedFrames(Closing):
    """The frames of a pack that this node has in a file: a `FrameStream`."""

    def __init__(self, path: str, file: io.FileIO) -> None:
        self._path, self._file = path, file

    @classmethod
    def open(cls, path: str, pack: KeptPack) -> CachedFrames:
        """Open a pack's file at its first frame; raises OSError, also where it was cut."""
        file = io.FileIO(path, "rb")
        try:
            if os.fstat(file.fileno()).st_size != pack.size_bytes:
                raise FileNotFoundError(path)
            file.seek(pack.boot_length)
        except OSError:
            file.close()
            raise
        return cls(path, file)

    def boot(self, pack: KeptPack) -> bytes:
        """The bytes before the frames, unchecked."""
        return os.pread(self._file.fileno(), pack.boot_length, 0)

    def readinto(self, view: memoryview, /) -> int:
        return self._file.readinto(view)

    def spoil(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        self._file.close()


class ByteStream(Protocol):
    """Bytes from elsewhere, in order."""

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end."""

    def close(self) -> None:
        """Let go of it."""


class CachingFrames(Closing):
    """Frames from a stream that are written to a file as they pass: a `FrameStream`.

    The file gets its name when all bytes have passed. A fault of the file, such as a full disk,
    ends the writing and nothing else.
    """

    def __init__(self, stream: ByteStream, path: str, size_bytes: int) -> None:
        self._stream, self._path, self._size_bytes = stream, path, size_bytes
        self._draft: Draft | None = None
        self._done_bytes = 0

    @classmethod
    def begin(cls, stream: ByteStream, path: str, boot: bytes, pack: KeptPack) -> CachingFrames:
        """Write a pack to `path`: `boot`, its first bytes, now, and what `stream` gives later."""
        frames = cls(stream, path, pack.size_bytes)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            frames._draft = Draft(path, mode=0o600, prefix=".pack-").open()
            frames._draft.write(boot)
            frames._done_bytes = len(boot)
        except OSError:
            frames._abandon()
        return frames

    def readinto(self, view: memoryview, /) -> int:
        count = self._stream.readinto(view)
        if self._draft is not None:
            try:
                self._draft.write(view[:count])
                self._done_bytes += count
                if self._done_bytes == self._size_bytes:
                    self._draft.publish(sync=False)  # its readers check the digests
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


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(path: str, data: bytes | memoryview) -> None:
    """Publish a file. Not synced: its readers check its digest."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, data, mode=0o600, prefix=".new-", sync=False)
    except OSError as error:
        raise from_os_error(error, f"keep {path}") from error
