"""Hot sets on this node's disk, which a mount replays where none is published.

The packer makes them of what starts read here (`local_packer`). Hot sets that `hotset build` made
here and that were not pushed count as well, and come first.
"""

from __future__ import annotations

import os

from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.hotset_manifest import HotSet
from bootseer.errors import BootseerError
from bootseer.imageprefetch.image_cache import ImageCache, KeptPack
from bootseer.imageprefetch.workloads import file_name
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.manifest import Manifest, parse_manifest
from bootseer.storage.oci.media_types import OCI_MANIFEST

MANIFEST_NAME, PACK_PREFIX = "manifest.json", "pack-"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalHotSet:
    """Where a hot set's pack lies, when it was made, and whether by command."""

    path: str
    pack: KeptPack
    created: str
    by_hand: bool


def find(local: ImageCache, digest: str, workload: str, block_image: str) -> LocalHotSet | None:
    """This node's hot set of one workload and block image; one built by command comes first."""
    for folder in (local.hot_set_folder(digest), local.own_hot_set_folder(digest)):
        hot_set_folder = os.path.join(folder, file_name(workload))
        hot = _read_manifest(hot_set_folder)
        if hot is not None and hot.block_image == block_image and hot.workload == workload:
            path = os.path.join(hot_set_folder, pack_name(hot.pack.digest))
            pack = KeptPack(hot.pack.digest, hot.pack.size_bytes, hot.boot_length, hot.boot_digest)
            if os.path.exists(path):
                by_hand = folder == local.hot_set_folder(digest)
                return LocalHotSet(path, pack, hot.created, by_hand)
    return None


def pack_name(digest: str) -> str:
    """The file name of a pack in its hot set's folder."""
    return f"{PACK_PREFIX}{digest.partition(':')[2]}"


def _read_manifest(folder: str) -> HotSet | None:
    """The manifest of the hot set in `folder`; None for none and for a damaged one."""
    try:
        with open(os.path.join(folder, MANIFEST_NAME), "rb") as file:
            raw = file.read(_MOST_BYTES)
    except OSError:
        return None
    try:
        manifest = parse_manifest(raw, OCI_MANIFEST, f"the hot set in {folder}")
        return hotset_manifest.parse_manifest(manifest) if isinstance(manifest, Manifest) else None
    except BootseerError:
        return None  # it will be made again
