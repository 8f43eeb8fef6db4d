"""Opening the store that a URL names.

A scheme's modules and libraries are imported at its first use, since `deps run` and `image mount`
open one kind of store and wait for every import.
"""

from __future__ import annotations

import os

from bootseer.errors import NotSupportedError, UsageError
from bootseer.storage.options import DEFAULTS, StoreOptions, options_from_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.storage.store import Store

_SUPPORTED = "use a directory, file://, http(s)://, webhdfs(s)://, hdfs://, oci:// or oci-layout:"
_SCHEMES = {"file", "http", "https", "webhdfs", "webhdfss", "swebhdfs", "hdfs", "s3", "oci"}


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open the store rooted at a folder: a URL, or a plain directory path.

    Nothing is created or contacted yet. Raises NotSupportedError for another scheme, or one whose
    library is not installed, and UsageError for a URL that cannot be used.
    """
    if url and "://" not in url and not url.startswith("oci-layout:"):
        if (scheme := url.partition(":")[0].lower()) != url.lower() and scheme in _SCHEMES:
            raise UsageError(
                f"the store begins with {scheme}: and not with {scheme}://; correct the URL, or"
                " write ./ before a directory of that name"
            )
        from bootseer.storage.local import LocalStore

        return LocalStore(url)
    from bootseer.storage.urls import HTTP_SCHEMES, WEBHDFS_SCHEMES, parse_url

    given, options = options, options or DEFAULTS
    if url.startswith(("oci://", "oci-layout:")):
        from bootseer.storage.oci.open import open_repository

        return open_repository(url, options)[0].store
    parsed = parse_url(url)
    if parsed.scheme == "file":
        from bootseer.storage.local import LocalStore

        return LocalStore(parsed.path)
    if parsed.scheme in HTTP_SCHEMES:
        from bootseer.storage.http.store import HttpStore

        return HttpStore(url, given or options_from_environment(os.environ))
    if parsed.scheme in WEBHDFS_SCHEMES:
        from bootseer.storage.webhdfs.store import WebHdfsStore

        return WebHdfsStore(url, options)
    if parsed.scheme == "hdfs":
        if options.hdfs_backend == "arrow":
            from bootseer.storage.hdfs.libhdfs_store import LibhdfsStore

            return LibhdfsStore.open(url, options)
        from bootseer.storage.hdfs.native_store import NativeStore

        return NativeStore.open(url, options)
    raise NotSupportedError(f"store scheme {parsed.scheme}:// is not supported; {_SUPPORTED}")


def open_object(url: str, options: StoreOptions | None = None) -> tuple[Store, str]:
    """Open the store of an object's folder; returns it with the object's name, decoded.

    Raises as `open_store`, and UsageError for a URL that names no object.
    """
    from bootseer.storage.urls import split_object

    folder, name = split_object(url)
    return open_store(folder, options), name
