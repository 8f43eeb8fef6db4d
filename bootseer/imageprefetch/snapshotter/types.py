"""The records of snapshots and images, and the errors of the snapshotter."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bootseer.errors import BusyError, UsageError

TARGET_LABEL = "containerd.io/snapshot.ref"
"""Set by a client that prefers not to unpack: the name of the snapshot that it needs."""
INHERITED_PREFIX = "containerd.io/snapshot/"


class Kind(enum.IntEnum):
    """Numbered as containerd's snapshots API does."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


class SnapshotExistsError(UsageError):
    """A snapshot of that name exists; or the one requested by label does now, without a fetch."""


class SnapshotStateError(BusyError):
    """The snapshot is of the wrong kind for this call, or others depend on it."""

    retryable = False


class Usage(NamedTuple):
    """What a snapshot takes on disk, without its parents."""

    size_bytes: int
    inodes: int


NOTHING = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot. `folder` is its directory's name below `snapshots/`, "" for a remote one.

    `image` and `depth` are set for remote ones: the manifest's digest, and the number of the layer
    that it represents, from 0. `top`: it is the last layer.
    """

    name: str
    parent: str
    kind: Kind
    created_ns: int
    updated_ns: int
    folder: str
    labels: Mapping[str, str] = field(default_factory=dict)
    usage: Usage = NOTHING
    image: str = ""
    depth: int = 0
    top: bool = False


@dataclass(frozen=True, slots=True)
class StockImage:
    """A stock image with remote snapshots.

    `reference` is the name that the client gave, `layers` the digests in the manifest's order.
    """

    digest: str
    reference: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that containerd is to make, in the words of mount(8)."""

    kind: str
    source: str
    options: tuple[str, ...]
