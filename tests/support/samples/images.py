"""Images for tests, written by hand: `Image`, `Layer`, `file`, `write_layout` and others.

A layer is a list of members (`file`, `directory`, `symlink`, `hardlink`, `device`, `fifo`,
`whiteout`, `opaque`), or a `Layer` that says its compression (gzip, zstd, none) or holds the bytes
of a tar file of any kind. Nothing is added: parents stand in the layer only when they are listed.

    made = write_layout(tmp_path / "layout", Image([[directory("a"), file("a/b", b"x")],
                                                    [whiteout("a/b")]]), tag="1")
    registry.push(made.source, "my/app", "1")       # `registry` is a fixture of labs.registry
    made.digest, made.manifest_digests              # what the tag stands for

Several images make an index; `Image(architecture="arm64")`, `flavour="docker"` (schema 2 types),
`write_docker_archive` (what `docker save` writes). Names may be bytes, content a path or
`Repeated(b"pattern", size_bytes)`.
"""

from __future__ import annotations

from tools.images.layout import (
    Image,
    Layer,
    Written,
    digest_of,
    write_docker_archive,
    write_layout,
    write_tar,
)
from tools.images.members import (
    MTIME_S,
    Member,
    Repeated,
    device,
    directory,
    fifo,
    file,
    hardlink,
    opaque,
    symlink,
    whiteout,
)

__all__ = [
    "MTIME_S",
    "Image",
    "Layer",
    "Member",
    "Repeated",
    "Written",
    "device",
    "digest_of",
    "directory",
    "fifo",
    "file",
    "hardlink",
    "opaque",
    "symlink",
    "whiteout",
    "write_docker_archive",
    "write_layout",
    "write_tar",
]
