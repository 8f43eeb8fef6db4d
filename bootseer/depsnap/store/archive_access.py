"""An archive of any store as a local file: the store's own, or a copy while it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.depsnap.store import records
from bootseer.depsnap.store.record_file import Record
from bootseer.errors import from_os_error
from bootseer.storage.store import Store

_FOLDER = "fetched"


@contextmanager
def local_archive(
    store: Store, record: Record, cache: str, limit_s: float | None = None
) -> Iterator[str]:
    """The path of the record's archive; a copy of a remote one is kept in the node's cache.

    With `limit_s` copying is given up once it has been so slow for so long that it would take
    longer than the install did. Raises the store's errors, DeadlineError for a copy that was given
    up, and NoSpaceError when the cache cannot hold it.
    """
    name = records.archive_name(record)
    local = store.local_path(name)
    if local is not None:
        yield local
        return
    from bootseer.storage.download import Patience, download  # its threads take long to import

    patience = None if limit_s is None else Patience(limit_s=limit_s, worth_s=record.install_s)
    path = _new_path(cache)
    download(store, name, path, patience)
    try:
        yield path
    finally:
        _unlink(path)


@contextmanager
def draft_path(store: Store, temporary: str, cache: str) -> Iterator[str]:
    """Where to write the content of the store's object `temporary`.

    In a store on this machine that is the object itself; else a file of the node's cache, which
    `upload` then copies.
    """
    local = store.local_path(temporary)
    if local is not None:
        yield local
        return
    path = _new_path(cache)
    try:
        yield path
    finally:
        _unlink(path)


def upload(store: Store, temporary: str, path: str) -> None:
    """Copy a draft to the store where it is not there already; its length is checked."""
    if store.local_path(temporary) is None:
        store.create_from_file(temporary, path)


def _new_path(cache: str) -> str:
    folder = os.path.join(cache, _FOLDER)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"make the folder {folder}") from error
    return os.path.join(folder, os.urandom(16).hex())


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # never made
