"""What the snapshotter knows of a snapshot, and its faults."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bootseer.errors import BusyError, UsageError

TARGET_LABEL = "containerd.io/snapshot.ref"
"""Set by a client that would rather not unpack: the name of the snapshot it wants to exist."""
INHERITED_PREFIX = "containerd.io/snapshot/"


class Kind(enum.IntEnum):
    """Numbered as containerd's snapshots API does."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


class SnapshotExistsError(UsageError):
    """A snapshot of that name exists; or the one asked for by label does now, without a fetch."""


class SnapshotStateError(BusyError):
    """The snapshot is of the wrong kind for this call, or others stand on it."""

    retryable = False


class Usage(NamedTuple):
    """What a snapshot itself takes on disk, its parents apart."""

    size_bytes: int
    inodes: int


NOTHING = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row. `folder` is its directory's name below `snapshots/`, "" for a remote one.

    `image` and `depth` are set for remote ones: the manifest's digest, and which of its layers
    this stands for, counted from 0.
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
class Image:
    """A stock image of which remote snapshots exist.

    `reference` is as the client named it, `layers` their digests in the manifest's order.
    """

    digest: str
    reference: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mount:
    """What containerd is to mount, in the words of mount(8)."""

    kind: str
    source: str
    options: tuple[str, ...]
