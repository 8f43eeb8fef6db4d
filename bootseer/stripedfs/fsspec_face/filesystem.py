"""The fsspec file system `striped`, chained before another: `striped::webhdfs://host/dir/ckpt.pt`.

It reads striped checkpoints and plain files alike; what is written is striped, or one plain object
when it is smaller than a chunk. Errors are Python's own where it has them (FileNotFoundError,
PermissionError, IsADirectoryError, FileExistsError), else ours, each an OSError as well
(`file_errors`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.spec import make_instance
from fsspec.utils import isfilelike

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.open import open_store
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.store import Store
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.file_errors import file_error
from bootseer.stripedfs.format.pointer import LinkOutsideError
from bootseer.stripedfs.fsspec_face import chained_urls
from bootseer.stripedfs.fsspec_face.cached_file import CachedFile
from bootseer.stripedfs.fsspec_face.write_file import (
    UnsupportedModeError,
    WriteFile,
    make_parents,
    python_errors,
    shown_path,
)
from bootseer.stripedfs.new_bytes import fill_bytes
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.cat_ranges import read_ranges
from bootseer.stripedfs.read.open import open_file
from bootseer.stripedfs.read.sources import FileSource
from bootseer.stripedfs.shared_fetcher import used_fetcher
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.saved_file import SavedFile
from bootseer.stripedfs.write.write_settings import WriteSettings

COPY_BYTES = 32 << 20
WRITE = WriteSettings()
T = TypeVar("T")


class StripedFileSystem(ChainedFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`fsspec.filesystem("striped", target_protocol="webhdfs", target_options={"host": …})`.

    `options` has what a URL cannot say (user, token file, CA, further NameNodes), `writing` how
    files are striped; both may be mappings. A `fetcher` of its own has its own budget of
    connections and memory; it stays in this process when the file system is pickled or written as
    JSON.
    """

    protocol: str | tuple[str, ...] = "striped"
    cachable = False  # `fo` differs with every URL: fsspec would keep one instance for each
    root_marker = "/"

    def __init__(
        self,
        fo: str = "",
        target_protocol: str = "file",
        target_options: dict[str, Any] | None = None,
        *,
        options: StoreOptions | Mapping[str, Any] = DEFAULTS,
        writing: WriteSettings | Mapping[str, Any] = WRITE,
        fetcher: Fetcher | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self._web = target_protocol in chained_urls.WEB
        given = target_options or {}
        self._base = "" if self._web else chained_urls.base_url(target_protocol, given)
        self._options = _add_user(_make_settings(StoreOptions, options), given)
        self._writing = _make_settings(WriteSettings, writing)
        self._fetcher = fetcher
        self._stores: dict[str, Store] = {}
        self._stores_pid = os.getpid()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
        # fsspec writes this for a link of a chain without a path; the path is in the next link.
        return "" if text == "striped://" else chained_urls.strip_prefixes(text)

    def __repr__(self) -> str:
        # Equal ones must look equal: fsspec and zarr compare their wrappers by this.
        return f"<{type(self).__name__} {self.fsid} {getattr(self, '_fs_token_', '')}>"

    def __reduce__(self) -> Any:
        given = {k: v for k, v in self.storage_options.items() if k != "fetcher"}
        return make_instance, (type(self), self.storage_args, given)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """What `from_dict` and `from_json` make an equal file system from."""
        plain = type(self)(*self.storage_args, **self.storage_options)
        plain.storage_options = {
            name: _settings_as_mapping(value)
            for name, value in self.storage_options.items()
            if name != "fetcher" and value is not None
        }
        described: dict[str, Any] = super(StripedFileSystem, plain).to_dict(
            include_password=include_password
        )
        return described

    @property
    def fsid(self) -> str:
        """Names the store this file system is rooted at."""
        return f"striped_{self._base or 'web'}"

    # --- looking ------------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        stripped = self._strip_protocol(path)
        with python_errors(stripped):
            return self._describe(stripped, self._look_up(stripped)[1])

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a path exists; raises where the store cannot say."""
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        stripped = self._strip_protocol(path)
        with python_errors(stripped):
            store, info = self._look_up(stripped)
            listed = [self._describe(stripped, info)]
            if info.is_folder:
                top = stripped.rstrip("/")
                listed = [
                    self._describe(f"{top}/{child.name.rpartition('/')[2]}", child)
                    for child in namespace.list_folder(store, info)
                    if not namespace.is_dangling(child)
                ]
        return listed if detail else [entry["name"] for entry in listed]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As fsspec's, but a directory checkpoint that is damaged is an error, and not empty."""
        stripped = self._strip_protocol(path)
        paths = super().find(stripped, maxdepth, withdirs, detail=detail, **kwargs)
        if not set(paths) - {stripped}:
            try:
                self.ls(stripped, detail=False)
            except CorruptDataError:
                raise
            except OSError:
                pass  # as in fsspec: what does not exist or cannot be listed holds nothing
        return paths

    def modified(self, path: str) -> Any:
        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], datetime.UTC)

    def created(self, path: str) -> Any:
        return self.modified(path)

    def checksum(self, path: str) -> str:
        """Names the bytes: equal checksums of striped files mean equal bytes.

        Where the store has no versions, it is another one each time: nothing can be cached by it.
        """
        return self._source(self._strip_protocol(path)).key or f"unknown:{os.urandom(16).hex()}"

    def ukey(self, path: str) -> str:
        return self.checksum(path)

    # --- reading ------------------------------------------------------------------------------

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> io.RawIOBase:
        if mode == "rb" and kwargs.get("cache_type") == "none":  # an fsspec cache adds its own
            file = self._file(path)
            kwargs |= {"block_size": block_size, "cache_options": cache_options}
            return CachedFile(self, path, file, **kwargs)
        if mode == "rb":
            return self._file(path)
        if mode not in ("wb", "xb"):
            text = f"{shown_path(path)} cannot be opened as {mode!r}; files are written once"
            raise UnsupportedModeError(text)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists already", shown_path(path))
        return WriteFile(self._open_saved_file(path), path, autocommit=autocommit)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        with self._file(self._strip_protocol(path)) as file:
            first, last = _slice_bounds(start, end, file.size)
            with python_errors(path):
                return fill_bytes(last - first, lambda view: file.read_at(first, view))

    def cat_ranges(
        self,
        paths: Sequence[str] | str,
        starts: Sequence[int | None] | int | None,
        ends: Sequence[int | None] | int | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        if isinstance(paths, str):
            raise TypeError("cat_ranges takes a list of paths")
        begins = starts if isinstance(starts, Sequence) else [starts] * len(paths)
        limits = ends if isinstance(ends, Sequence) else [ends] * len(paths)
        if not len(paths) == len(begins) == len(limits):
            raise ValueError("cat_ranges takes as many starts and ends as paths")
        stripped = [self._strip_protocol(path) for path in paths]
        results = read_ranges(
            self._source_or_error,
            [(p, b, e) for p, b, e in zip(stripped, begins, limits, strict=True)],
            bounds=_slice_bounds,
            fetcher=self._fetcher,
        )
        results = [file_error(r) if isinstance(r, BootseerError) else r for r in results]
        if on_error == "raise":
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return list(results)

    def get_file(
        self,
        rpath: str,
        lpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        path = self._strip_protocol(rpath)
        if not isfilelike(lpath) and self.isdir(path):
            self.ls(path, detail=False)  # a folder that cannot be listed is an error, not empty
            os.makedirs(lpath, exist_ok=True)
            return
        with self._file(path) as file, contextlib.ExitStack() as stack:
            callback.set_size(file.size)
            given = lpath if isfilelike(lpath) else outfile
            target = given or stack.enter_context(open(make_parents(lpath), "wb", buffering=0))
            _copy(file, target, file.size, callback)

    # --- writing ------------------------------------------------------------------------------

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Callback = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        path = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            self.makedirs(path, exist_ok=True)
            return
        callback.set_size(os.path.getsize(lpath))
        with (
            open(lpath, "rb", buffering=0) as source,
            self._open(path, "xb" if mode == "create" else "wb") as target,
        ):
            _copy(source, target, COPY_BYTES, callback)  # a pipe has no size, and a file may grow

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists already", shown_path(path))
        if not create_parents and not self.isdir(self._parent(path)):
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist", shown_path(path))
        self.makedirs(path, exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists already", shown_path(path))
        with python_errors(path):
            store, name = self._at(path)
            if not name:
                return
            rename_remove.check_new(store, name)
            try:
                info = self._look_up(path)[1]
            except NotFoundError:
                store.mkdir(name)
            else:
                if not info.is_folder:
                    raise FileExistsError(errno.EEXIST, "a file has this name", shown_path(path))

    def rmdir(self, path: str) -> None:
        path = self._strip_protocol(path)
        if not self.isdir(path):
            raise FileNotFoundError(errno.ENOENT, "no such folder", shown_path(path))
        if self.ls(path, detail=False):
            raise OSError(errno.ENOTEMPTY, "the folder is not empty", shown_path(path))
        try:
            self.rm_file(path)
        except BootseerError as error:
            hidden = rename_remove.list_held(*self._at(path))
            if not hidden:
                raise
            text = f"the folder is not empty: it holds {', '.join(hidden)}"
            raise OSError(errno.ENOTEMPTY, text, shown_path(path)) from error

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        with python_errors(path):
            rename_remove.remove(*self._look_up(path, follow=False))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in path if isinstance(path, list) else [path]:
            try:
                expanded = self.expand_path(each, maxdepth=maxdepth)
            except FileNotFoundError:  # fsspec's own, which quotes the path as it was given
                name = shown_path(self._strip_protocol(each))
                raise FileNotFoundError(errno.ENOENT, "no such file", name) from None
            for one in expanded:
                with python_errors(one):
                    rename_remove.remove(*self._look_up(one, follow=False), recursive=recursive)

    def mv(
        self,
        path1: str,
        path2: str,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if old == new:
            return
        with python_errors(old):
            store, info = self._look_up(old, follow=False)
            if info.is_folder and not recursive and info.version is None:
                raise IsADirectoryError(
                    errno.EISDIR, "a folder moves only recursively", shown_path(old)
                )
            if new.endswith("/") or self.isdir(new):
                new = f"{new.rstrip('/')}/{old.rpartition('/')[2]}"
            target, new_name = self._at(new)
            if target is not store:
                raise NotSupportedError(
                    f"{shown_path(old)} cannot be moved to another store; copy it"
                )
            try:
                rename_remove.move(store, info, new_name)
            except BusyError as error:
                raise FileExistsError(errno.EEXIST, str(error), shown_path(new)) from error

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(old):
            self.ls(old, detail=False)  # as in get_file
            self.makedirs(new, exist_ok=True)
            return
        with self._file(old) as source, self._open(new, "wb") as target:
            _copy(source, target, source.size)

    def close(self) -> None:
        """Close idle connections; further use opens new ones."""
        stores, self._stores = self._stores, {}
        fetcher = self._fetcher if self._fetcher is not None else used_fetcher()
        for store in stores.values():
            if fetcher is not None and self._stores_pid == os.getpid():
                fetcher.forget_store(store)
            store.close()

    # --- inside -------------------------------------------------------------------------------

    def _at(self, path: str) -> tuple[Store, str]:
        if self._web and "://" not in path:
            raise UsageError(f"{path} is no URL; give it whole, from https:// on")
        url, name = chained_urls.split_path(self._base, path)
        return self._store(url), name

    def _store(self, url: str) -> Store:
        if self._stores_pid != os.getpid():  # forked: the connections are the parent's
            self._stores, self._stores_pid = {}, os.getpid()
        store = self._stores.get(url)
        if store is None:
            store = self._stores.setdefault(url, open_store(url, self._options))
        return store

    def _look_up(self, path: str, *, follow: bool = True) -> tuple[Store, namespace.PathInfo]:
        """What a path stands for, and its store. `follow` as in `namespace.look_up`.

        A web object's store is its folder. Where the object does not exist, the server's root is
        asked whether a folder further up is a directory checkpoint that holds it.
        """
        store, name = self._at(path)
        web = path.partition("://")[0] in chained_urls.WEB
        if web and namespace.is_dcp_file(name):  # its folder's pointer says what it is part of
            with contextlib.suppress(NotFoundError, AccessDeniedError):
                url, whole = chained_urls.split_at_top(path)
                top = self._store(url)
                return top, namespace.look_up(top, whole, follow=follow)
        try:
            return store, namespace.look_up(store, name, follow=follow)
        except NotFoundError as error:
            if not web:
                raise
            url, whole = chained_urls.split_at_top(path)
            top = self._store(url)
            # A link in the folder may lead out of it, but not out of the server.
            leads_out = isinstance(error, LinkOutsideError)
            find = namespace.look_up if leads_out else namespace.find_in_tree
            try:
                info = find(top, whole, follow=follow)
            except AccessDeniedError:  # a server may deny access to all folders above the object
                info = None
            if info is None:
                raise
            return top, info

    def _source(self, path: str) -> FileSource:
        with python_errors(path):
            store, info = self._look_up(path)
            if info.is_folder:
                raise IsADirectoryError(errno.EISDIR, "it is a folder", shown_path(path))
            return open_file(store, info)

    def _source_or_error(self, path: str) -> FileSource | Exception:
        try:
            return self._source(path)
        except (BootseerError, OSError) as error:
            return error

    def _file(self, path: str) -> StripedFile:
        return StripedFile.open(_Reopen(self, path), fetcher=self._fetcher, name=shown_path(path))

    def _open_saved_file(self, path: str) -> SavedFile:
        with python_errors(path):
            store, name = self._at(path)
            rename_remove.check_unreserved(name)
            try:
                info = namespace.look_up(store, name)
            except NotFoundError:
                rename_remove.check_new(store, name)
            else:
                rename_remove.check_whole(store, info)
                if info.is_folder:
                    raise IsADirectoryError(errno.EISDIR, "it is a folder", shown_path(path))
                name = info.name  # what a link leads to, not the link
            return SavedFile(store, name, self._writing)

    def _describe(self, path: str, info: namespace.PathInfo) -> dict[str, Any]:
        described = {
            "name": path,
            "size": info.size_bytes,
            "type": "directory" if info.is_folder else "file",
            "mtime": info.mtime_s,
            "striped": info.striped,
        }
        if info.etag and not info.is_folder:
            described["ETag"] = info.etag  # the key by which `datasets` distinguishes versions
        if info.link:
            described |= {"type": "link", "islink": True, "destination": info.link}
        if info.problem is not None:
            described |= {"type": "other", "problem": str(info.problem)}
        return described


class _Reopen:
    """Opens a path again with a file system of the same arguments, wherever it was pickled to."""

    def __init__(self, files: StripedFileSystem, path: str) -> None:
        self._files, self._path = files, path

    def __call__(self) -> FileSource:
        return self._files._source(self._path)


def _copy(
    source: io.RawIOBase, target: Any, size: int, callback: Callback = DEFAULT_CALLBACK
) -> None:
    """Copy all of `source`, through a buffer that holds no more than `size`."""
    buffer = memoryview(bytearray(max(1, min(COPY_BYTES, size))))
    while count := source.readinto(buffer):
        left = buffer[:count]
        while left:
            left = left[target.write(left) :]
        callback.relative_update(count)


def _slice_bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Offsets of a range, by Python's rules for slices."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _make_settings(kind: type[T], given: T | Mapping[str, Any]) -> T:
    """Make settings from a mapping, as it comes from JSON; settings stay as they are."""
    if not isinstance(given, Mapping):
        return given
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return kind(**{**given, **lists})


def _settings_as_mapping(value: Any) -> Any:
    """Settings of ours as a mapping of what differs from the default; anything else as it is."""
    if not isinstance(value, StoreOptions | WriteSettings):
        return value
    usual = type(value)()
    pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {name: each for name, each in pairs if each != getattr(usual, name)}


def _add_user(options: StoreOptions, given: dict[str, Any]) -> StoreOptions:
    user = given.get("user") or given.get("username")
    return dataclasses.replace(options, user=str(user)) if user and not options.user else options
