"""From a URL to what it names, within a directory checkpoint too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bootseer.errors import NotFoundError, UsageError
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import Found

if TYPE_CHECKING:
    from bootseer.storage.options import StoreOptions


def locate(url: str, options: StoreOptions | None = None) -> tuple[Store, Found]:
    """What a URL stands for, and the store it was found in, which the caller closes.

    Looks above the URL's folder for a directory checkpoint that holds it. Raises NotFoundError.
    """
    from bootseer.storage.urls import split_object

    try:
        folder, name = split_object(url)
    except UsageError:
        store = open_store(url, options)  # the root of a store has no name
        return store, namespace.look(store, "")
    first: NotFoundError | None = None
    if namespace.is_member(name):  # whether it is a file of its own only its folder's pointer says
        with contextlib.suppress(UsageError):
            above, part = split_object(folder)
            if part not in (".", ".."):
                folder, name = above, f"{part}/{name}"
    while True:
        store = open_store(folder, options)
        try:
            return store, namespace.look(store, name)
        except NotFoundError as error:
            first = first or error
            store.close()
        except BaseException:  # who asked never had it to close
            store.close()
            raise
        try:
            folder, part = split_object(folder)
        except UsageError:
            raise first from None
        if part in (".", ".."):
            raise first
        name = f"{part}/{name}"
