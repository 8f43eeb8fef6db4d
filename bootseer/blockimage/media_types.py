"""The names that a block image's and a hot set's parts bear in a registry. Imports nothing."""

from __future__ import annotations

BLOCK_IMAGE = "application/vnd.bootseer.blockimage.v1"
META = "application/vnd.bootseer.blockimage.meta.v1+zstd"
TABLE = "application/vnd.bootseer.blockimage.table.v1"
DATA = "application/vnd.bootseer.blockimage.data.v1"
HOT_SET = "application/vnd.bootseer.hotset.v1"
PACK = "application/vnd.bootseer.hotset.pack.v1"
WORKLOAD_NOTE = "dev.bootseer.workload"
"""The annotation of a hot set's manifest that names its workload."""
CREATED_NOTE = "org.opencontainers.image.created"
