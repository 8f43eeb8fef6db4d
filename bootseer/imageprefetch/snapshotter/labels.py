"""Which image a client is pulling, by the labels of the layer that it has prepared. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bootseer.imageprefetch.snapshotter.types import INHERITED_PREFIX, TARGET_LABEL

# (image reference, manifest digest, layer digest): containerd's CRI plugin, nerdctl and newer
# `ctr` set the first; `ctr-remote images rpull` sets the second, which lacks the manifest.
_FAMILIES = (
    ("cri.image-ref", "cri.manifest-digest", "cri.layer-digest"),
    ("remote/stargz.reference", "", "remote/stargz.digest"),
)


@dataclass(frozen=True, slots=True)
class RequestedLayer:
    """A layer that a client prefers not to fetch.

    `target` is the name of the snapshot that it would become, `digest` that of the image's
    manifest, "" where the client did not name it.
    """

    target: str
    reference: str
    digest: str
    layer: str


def requested_layer(labels: Mapping[str, str]) -> RequestedLayer | None:
    """None when the labels name no target; `reference` is "" when they name no image."""
    target = labels.get(TARGET_LABEL, "")
    if not target:
        return None
    for reference, digest, layer in _FAMILIES:
        name = labels.get(INHERITED_PREFIX + reference, "")
        if name:
            manifest = labels.get(INHERITED_PREFIX + digest, "") if digest else ""
            return RequestedLayer(target, name, manifest, labels.get(INHERITED_PREFIX + layer, ""))
    return RequestedLayer(target, "", "", "")
