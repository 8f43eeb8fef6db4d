"""An archive of any store as a local file: where it lies, or a copy for as long as it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.depsnap.store import records
from bootseer.errors import from_os_error
from bootseer.storage.store import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.storage.download import Patience

FOLDER = "fetched"


@contextmanager
def archive_path(
    store: Store, record: records.Record, cache: str, patience: Patience | None = None
) -> Iterator[str]:
    """The record's archive as a path; a copy from elsewhere lies in the node's cache meanwhile.

    Raises the store's errors, DeadlineError where `patience` with a copy ends, and NoSpaceError
    when the cache cannot hold it.
    """
    name = f"{records.folder(record.key)}/{record.archive.name}"
    there = store.local_path(name)
    if there is not None:
        yield there
        return
    from bootseer.storage.download import download  # its threads take long to import

    path = _free_path(cache)
    download(store, name, path, patience)
    try:
        yield path
    finally:
        _unlink(path)


@contextmanager
def draft_path(store: Store, temporary: str, cache: str) -> Iterator[str]:
    """Where to write what will become the store's object `temporary`.

    In a store on this machine that is the object itself; else a file of the node's cache, which
    `upload` then puts there.
    """
    there = store.local_path(temporary)
    if there is not None:
        yield there
        return
    path = _free_path(cache)
    try:
        yield path
    finally:
        _unlink(path)


def upload(store: Store, temporary: str, path: str) -> None:
    """Bring a draft to the store where it is not there already; its length is checked."""
    if store.local_path(temporary) is None:
        store.create_from_file(temporary, path)


def _free_path(cache: str) -> str:
    folder = os.path.join(cache, FOLDER)
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
