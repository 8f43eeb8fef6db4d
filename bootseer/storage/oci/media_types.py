"""Media types of manifests and blobs in a registry, and our annotations of manifests.

Sources: OCI image specification 1.1; Docker's image manifest version 2 schema 2;
docs/block-image-format.md for ours. Imports nothing.
"""

from __future__ import annotations

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = frozenset((OCI_INDEX, DOCKER_INDEX))
MANIFEST_TYPES = frozenset((OCI_MANIFEST, DOCKER_MANIFEST))
ACCEPT = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST))

# A block image and its blobs.
BLOCK_IMAGE = "application/vnd.bootseer.blockimage.v1"
CONFIG = "application/vnd.bootseer.blockimage.config.v1+json"
META = "application/vnd.bootseer.blockimage.meta.v1+zstd"
TABLE = "application/vnd.bootseer.blockimage.table.v1"
DATA = "application/vnd.bootseer.blockimage.data.v1"
FILES = "application/vnd.bootseer.blockimage.files.v1+zstd"

# A hot set and its blobs.
HOT_SET = "application/vnd.bootseer.hotset.v1"
PACK = "application/vnd.bootseer.hotset.pack.v1"
TRACE = "application/vnd.bootseer.hotset.trace.v1+zstd"

# Annotations of a hot set's manifest.
CREATED_NOTE = "org.opencontainers.image.created"
WORKLOAD_NOTE = "dev.bootseer.workload"
BLOCK_IMAGE_NOTE = "dev.bootseer.blockimage"
STARTS_NOTE = "dev.bootseer.starts"
