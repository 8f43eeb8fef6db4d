"""Read-ahead of the modules that a command is sure to import, into the page cache.

The interpreter reads one module after another and waits for each. On a node with a cold page cache
these waits are a third of a placement; requested together, the files are in memory by the time the
interpreter imports them.
"""

from __future__ import annotations

import os
import sys
from _imp import extension_suffixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_DEPS_RUN = """
    types operator keyword reprlib collections/__init__ functools enum re/_constants re/_parser
    re/_casefix re/_compiler copyreg re/__init__ lib-dynload/_json json/scanner json/decoder
    json/encoder json/__init__ bootseer/errors bootseer/depsnap/__init__
    bootseer/depsnap/key/__init__ collections/abc bootseer/light_dataclasses
    bootseer/events/redaction bootseer/events/encoding bootseer/events/writer
    bootseer/events/__init__ bootseer/system/__init__ lib-dynload/_sha256 bootseer/system/sha256
    bootseer/system/regular_files bootseer/depsnap/key/input_files
    bootseer/depsnap/key/pip_settings signal lib-dynload/math lib-dynload/select
    bootseer/system/readiness bootseer/depsnap/key/python_probe bootseer/depsnap/key/uv_config
    bootseer/depsnap/key/shell_script bootseer/depsnap/key/tool_options
    bootseer/depsnap/key/variables bootseer/depsnap/key/install_command bootseer/system/paths
    bootseer/depsnap/key/install_roots contextlib bootseer/depsnap/install_process
    bootseer/depsnap/types bootseer/depsnap/settings bootseer/depsnap/shared_tree/__init__
    bootseer/depsnap/restore/__init__ lib-dynload/fcntl bootseer/context_managers
    bootseer/system/file_lock bootseer/depsnap/restore/staging lib-dynload/_struct struct
    bootseer/system/libc bootseer/system/mount_calls bootseer/system/mountinfo
    bootseer/depsnap/shared_tree/packed_mount bootseer/system/atomic bootseer/system/processes
    bootseer/depsnap/shared_tree/placement_records bootseer/system/blocking_calls
    bootseer/depsnap/shared_tree/cache bootseer/depsnap/shared_tree/forms
    bootseer/depsnap/store/__init__ bootseer/depsnap/json_faults
    bootseer/depsnap/store/record_file bootseer/storage/__init__ _weakrefset threading
    bootseer/storage/request_control bootseer/storage/store bootseer/depsnap/store/records
    bootseer/depsnap/store/archive_access bootseer/depsnap/placement
    bootseer/depsnap/target_note bootseer/depsnap/pins bootseer/depsnap/key/requirements
    bootseer/depsnap/key/roots_state bootseer/depsnap/key/snapshot_key
    bootseer/depsnap/key/resolver bootseer/depsnap/lock_match bootseer/storage/options
    bootseer/storage/open bootseer/depsnap/run_plan bootseer/depsnap/run_report
    bootseer/depsnap/snapshot_search bootseer/depsnap/run bootseer/entrypoint/__init__
    bootseer/entrypoint/job_process bootseer/config/__init__ bootseer/config/paths
    bootseer/events/resource bootseer/storage/local lib-dynload/_ctypes ctypes/_endian
    ctypes/__init__
"""
_DEPS_RESTORE = """
    bootseer/depsnap/format/__init__ lib-dynload/_hashlib lib-dynload/_blake2 hashlib warnings
    lib-dynload/_typing typing platform site-packages/zstandard/backend_c.so
    site-packages/zstandard/__init__ weakref copy ast lib-dynload/_opcode opcode dis
    importlib/__init__ token tokenize linecache inspect dataclasses
    bootseer/depsnap/capture/__init__ bootseer/depsnap/capture/entries
    bootseer/depsnap/format/unit_layout bootseer/depsnap/format/index_records
    bootseer/depsnap/format/frames lib-dynload/binascii base64
    bootseer/depsnap/format/index_checks bootseer/depsnap/format/index lib-dynload/mmap
    bootseer/depsnap/restore/unpack_worker bootseer/system/child_processes
    bootseer/depsnap/restore/unpack bootseer/blockimage/__init__
    bootseer/blockimage/tree_entries bootseer/blockimage/erofs_format
    bootseer/blockimage/erofs_writer bootseer/depsnap/format/packed_tree encodings/ascii
"""
_IMAGE_MOUNT = """
    bootseer/cli/__init__ bootseer/cli/image/__init__ bootseer/imageprefetch/__init__
    bootseer/imageprefetch/resolve/__init__ bootseer/system/__init__
    bootseer/system/child_processes bootseer/storage/__init__ keyword operator reprlib
    collections/__init__ collections/abc bootseer/light_dataclasses types functools _weakrefset
    threading bootseer/storage/request_control bootseer/storage/options
    bootseer/storage/oci/__init__ lib-dynload/_hashlib lib-dynload/_blake2 hashlib enum
    re/_constants re/_parser re/_casefix re/_compiler copyreg re/__init__ lib-dynload/_json
    json/scanner json/decoder json/encoder json/__init__ contextlib warnings lib-dynload/_typing
    typing bootseer/storage/oci/media_types bootseer/storage/oci/reference
    bootseer/storage/oci/manifest signal bootseer/storage/oci/open urllib/__init__ ipaddress
    urllib/parse bootseer/context_managers bootseer/storage/oci/platforms
    bootseer/storage/oci/referrers bootseer/storage/oci/registry/__init__
    bootseer/storage/http/__init__ http/__init__ email/__init__ email/errors
    lib-dynload/binascii string email/quoprimime lib-dynload/_struct struct base64
    email/base64mime quopri email/encoders email/charset email/header lib-dynload/math
    lib-dynload/_bisect bisect lib-dynload/_random lib-dynload/_sha512 random lib-dynload/select
    selectors lib-dynload/array socket lib-dynload/_datetime datetime locale calendar
    email/_parseaddr email/utils email/_policybase email/feedparser email/parser
    email/_encoded_words email/iterators email/message lib-dynload/_ssl ssl http/client
    bootseer/storage/store bootseer/events/redaction bootseer/events/encoding
    bootseer/events/writer bootseer/events/__init__ bootseer/storage/urls
    bootseer/storage/http/responses bootseer/storage/http/errors bootseer/storage/http/exchange
    bootseer/storage/oci/registry/mirrors bootseer/config/__init__ bootseer/config/paths
    bootseer/storage/http/pool bootseer/storage/oci/registry/challenge
    bootseer/storage/oci/registry/logins bootseer/storage/oci/registry/auth bootseer/system/lru
    bootseer/storage/oci/registry/registry_client lib-dynload/_contextvars contextvars
    bootseer/storage/retry bootseer/storage/oci/registry/blob_stream
    bootseer/storage/read_only_store bootseer/storage/oci/registry/blobs
    bootseer/storage/oci/registry/manifests bootseer/storage/oci/registry_repository
    tomllib/_types tomllib/_re tomllib/_parser tomllib/__init__ lib-dynload/unicodedata
    stringprep encodings/idna bootseer/system/atomic bootseer/imageprefetch/image_cache
    bootseer/storage/oci/config bootseer/imageprefetch/mount/__init__
    bootseer/blockimage/__init__ lib-dynload/fcntl bootseer/system/libc
    bootseer/system/mount_calls bootseer/system/mountinfo bootseer/blockimage/erofs_mount
    bootseer/blockimage/serve/__init__ platform site-packages/zstandard/backend_c.so
    site-packages/zstandard/__init__ bootseer/blocks/__init__ bootseer/blocks/extents
    site-packages/xxhash/_xxhash.so site-packages/xxhash/version site-packages/xxhash/__init__
    bootseer/blocks/cache/__init__ bootseer/blocks/source bootseer/blocks/cache/present_index
    bootseer/blocks/table bootseer/blocks/zstd_frames bootseer/blockimage/pack_format
    bootseer/blocks/settings bootseer/blocks/link_turns bootseer/blockimage/serve/byte_source
    bootseer/fuse/__init__
    bootseer/fuse/operations bootseer/fuse/serve/__init__ bootseer/fuse/protocol/__init__
    bootseer/fuse/protocol/requests bootseer/fuse/protocol/replies
    bootseer/fuse/serve/requesters bootseer/reporting bootseer/fuse/serve/pending_replies
    bootseer/blockimage/serve/data_file bootseer/blockimage/serve/opened_image
    bootseer/system/paths bootseer/system/processes bootseer/system/readiness
    bootseer/fuse/serve/daemon bootseer/fuse/mount/__init__ bootseer/fuse/mount/agent_mount
    bootseer/fuse/mount/mount_point
    bootseer/system/file_lock bootseer/imageprefetch/mount/container_folders
    bootseer/imageprefetch/mount/server_registry bootseer/imageprefetch/mount/mount_events
    bootseer/imageprefetch/mount/readahead_notices bootseer/imageprefetch/record/__init__
    bootseer/imageprefetch/record/touch_journal bootseer/imageprefetch/record/start_recording
    bootseer/blockimage/hotset_manifest bootseer/imageprefetch/block_image_repo
    bootseer/storage/bounded_calls bootseer/imageprefetch/resolve/deadline
    bootseer/imageprefetch/resolve/resolver bootseer/imageprefetch/mount/mount_worker
    bootseer/cli/shared/__init__ bootseer/cli/shared/size_text bootseer/cli/image/outcome
    bootseer/imageprefetch/mount/settings bootseer/imageprefetch/mount/mount
    bootseer/imageprefetch/mount/interrupts bootseer/imageprefetch/workloads
    bootseer/fuse/mount/mount_options bootseer/fuse/mount/mount lib-dynload/mmap
    bootseer/fuse/mount/passthrough bootseer/fuse/serve/dispatch lib-dynload/_heapq heapq
    lib-dynload/_queue queue bootseer/fuse/serve/receive_loop bootseer/fuse/serve/server
    bootseer/fuse/serve/handover lib-dynload/_ctypes ctypes/_endian ctypes/__init__
    encodings/ascii bootseer/events/resource bootseer/imageprefetch/resolve/helped_repository
    bootseer/imageprefetch/mount/serverless_choice bootseer/blockimage/serve/fill_settings
    bootseer/blockimage/serve/huge_pages bootseer/blockimage/serve/image_server
    bootseer/blocks/trace/__init__ bootseer/blocks/trace/trace_file
    bootseer/blocks/trace/recorder
"""
DEPS_RUN = tuple(_DEPS_RUN.split())
"""What a second start of `deps run` imports, approximately in that order.

Each entry is a file below the folder that holds the bootseer package, or below the standard
library, without its suffix. A test compares the list with a start.
"""

DEPS_RESTORE = tuple(_DEPS_RESTORE.split())
"""What a start of `deps run` imports besides, once it has a tree to unpack."""
IMAGE_MOUNT = tuple(_IMAGE_MOUNT.split())
"""What an `image mount` imports on a node without an agent, until the tree is mounted: the
command, the server and the registry helper."""

_SITE_PACKAGES = "site-packages/"
"""Prefix of modules of other projects; the name of an extension module ends in `.so`."""

MOST_BYTES = 128 << 10
"""Read ahead of one byte-code file; no file of bootseer or the standard library is longer.

Of an extension module eight times as much: what follows is for debuggers.
"""


def prefetch_modules(modules: Iterable[str]) -> None:
    """Have the kernel read the files of these modules, without waiting for it.

    Missing files are skipped: a module built into the interpreter, byte code not yet written.
    """
    for path in module_files(modules):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            most = MOST_BYTES if path.endswith(".pyc") else 8 * MOST_BYTES
            os.posix_fadvise(descriptor, 0, most, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # the file system does not support it
        os.close(descriptor)


def module_files(modules: Iterable[str]) -> list[str]:
    """Return the paths of these modules' byte-code files or shared libraries."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    standard = os.path.dirname(os.path.abspath(os.__file__))
    others = next((path for path in sys.path if path.endswith("-packages")), ours)
    library_suffix = extension_suffixes()[0]
    code_suffix = f"{sys.implementation.cache_tag}.pyc"
    paths = []
    for module in modules:
        folder, _, name = module.rpartition("/")
        if folder == "lib-dynload":
            paths.append(f"{standard}/{module}{library_suffix}")
            continue
        if folder.startswith(_SITE_PACKAGES):
            base, folder = others, folder.removeprefix(_SITE_PACKAGES)
        else:
            base = ours if folder.startswith("bootseer") else standard
        if name.endswith(".so"):
            paths.append(os.path.join(base, folder, name.removesuffix(".so") + library_suffix))
            continue
        paths.append(os.path.join(base, folder, "__pycache__", f"{name}.{code_suffix}"))
    return paths
