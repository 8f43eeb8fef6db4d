"""The files of the modules that a command is sure to import, asked of the disk all at once.

An interpreter reads one module after another and waits for each. On a node whose page cache holds
none of them, these waits are a third of a placement; asked for together, the disk has read them by
the time the interpreter comes to them.
"""

from __future__ import annotations

import os
import sys
from _imp import extension_suffixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_DEPS_RUN = """
    bootseer/errors bootseer/depsnap/__init__ bootseer/depsnap/keying/__init__ types operator
    keyword reprlib collections/__init__ functools enum re/_constants re/_parser re/_casefix
    re/_compiler copyreg re/__init__ signal collections/abc bootseer/light_dataclasses
    bootseer/depsnap/keying/command lib-dynload/math lib-dynload/select bootseer/readiness
    bootseer/regular_files bootseer/depsnap/keying/roots contextlib _weakrefset threading
    lib-dynload/_json json/scanner json/decoder json/encoder json/__init__
    bootseer/depsnap/format/__init__ bootseer/depsnap/format/malformed bootseer/depsnap/model
    bootseer/storage/__init__ bootseer/storage/attempt bootseer/storage/options
    bootseer/storage/base bootseer/depsnap/records bootseer/depsnap/keying/pins lib-dynload/_sha256
    bootseer/sha256 bootseer/depsnap/keying/pip_settings bootseer/depsnap/keying/redact
    bootseer/depsnap/keying/requirements bootseer/depsnap/keying/key
    bootseer/depsnap/keying/resolver bootseer/depsnap/fitting bootseer/depsnap/install
    bootseer/depsnap/reach lib-dynload/fcntl bootseer/atomic bootseer/depsnap/time_limit
    bootseer/depsnap/target bootseer/depsnap/settings bootseer/depsnap/sharing/__init__
    bootseer/depsnap/restoring/__init__ bootseer/depsnap/restoring/staging
    bootseer/depsnap/sharing/mounts bootseer/depsnap/sharing/machine
    bootseer/depsnap/sharing/placements bootseer/depsnap/sharing/packed
    bootseer/depsnap/sharing/treecache bootseer/depsnap/sharing/place bootseer/depsnap/sharing/tree
    bootseer/depsnap/prepare bootseer/depsnap/waiting bootseer/profiler/__init__
    bootseer/profiler/events bootseer/depsnap/run bootseer/config_paths bootseer/profiler/resource
    bootseer/depsnap/keying/uvrun bootseer/contexts bootseer/storage/local lib-dynload/_contextvars
    contextvars bootseer/storage/waits bootseer/storage/retry bootseer/storage/download
    encodings/ascii lib-dynload/_ctypes lib-dynload/_struct struct ctypes/_endian ctypes/__init__
"""
DEPS_RUN = tuple(_DEPS_RUN.split())
"""What a second start of `deps run` imports, about in that order: files below our package's folder
or the standard library's, without their suffixes. A test compares it with a start."""

MOST_BYTES = 128 << 10
"""Of one file. Byte code is shorter; what libraries have behind that is for debuggers."""


def ask_for(modules: Iterable[str]) -> None:
    """Have the kernel read these modules' files; waits for none of them.

    What is not there (a module built into the interpreter, byte code not yet written) is left out.
    """
    for path in files_of(modules):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, MOST_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # of a file system that takes no advice
        os.close(descriptor)


def files_of(modules: Iterable[str]) -> list[str]:
    """Where the interpreter finds the byte code of these modules, or the library that they are."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    standard = os.path.dirname(os.path.abspath(os.__file__))
    library, code = extension_suffixes()[0], f"{sys.implementation.cache_tag}.pyc"
    paths = []
    for module in modules:
        folder, _, name = module.rpartition("/")
        if folder == "lib-dynload":
            paths.append(f"{standard}/{module}{library}")
            continue
        above = ours if folder.startswith("bootseer") else standard
        paths.append(os.path.join(above, folder, "__pycache__", f"{name}.{code}"))
    return paths
