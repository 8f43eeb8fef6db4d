"""A tree becomes an image: EROFS metadata, data in stored blocks, their table and a file map."""

from __future__ import annotations

from dataclasses import dataclass

from bootseer.blockimage.filemap import FileMap
from bootseer.blocks.table import Table


@dataclass(frozen=True, slots=True)
class Built:
    """An image on disk.

    `meta_path` is the EROFS metadata as it is mounted, `data_path` the stored blocks that `table`
    describes. The raw data, `table.size_bytes`, is what the mount's one extra device must hold.
    """

    meta_path: str
    data_path: str
    table: Table
    files: FileMap
