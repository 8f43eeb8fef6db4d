"""The options of an injection, and the names of everything that it puts in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from bootseer import __version__

INIT_CONTAINER = "bootseer-init"
VOLUME = "bootseer"
EVENTS_VOLUME, STORE_VOLUME = "bootseer-events", "bootseer-store"
CACHE_VOLUME, CONFIG_VOLUME = "bootseer-cache", "bootseer-config"
NAMES = (VOLUME, EVENTS_VOLUME, STORE_VOLUME, CACHE_VOLUME, CONFIG_VOLUME, INIT_CONTAINER)

HOME = "/opt/bootseer"
LAUNCHER = f"{HOME}/bin/bootseer"
EVENTS_PATH, STORE_PATH, CACHE_PATH = "/bootseer/events", "/bootseer/store", "/bootseer/cache"
CONFIG_PATH = "/bootseer/config"
PATHS = (HOME, EVENTS_PATH, STORE_PATH, CACHE_PATH, CONFIG_PATH)
MARK_VARIABLE = "BOOTSEER_INJECTED"

VARIABLES = (
    "BOOTSEER_EVENTS",
    "BOOTSEER_JOB_NAMESPACE",
    "BOOTSEER_JOB_NAME",
    "BOOTSEER_JOB_UID",
    "BOOTSEER_ATTEMPT",
    "K8S_POD_NAME",
    "K8S_POD_UID",
    "K8S_NAMESPACE",
    "K8S_NODE_NAME",
    "BOOTSEER_STORE",
    "BOOTSEER_CACHE",
)
"""Variables that an injection sets; they stand before `MARK_VARIABLE` in a container's list."""

Part = Literal["events", "image", "deps", "checkpoint"]
PARTS: tuple[Part, ...] = ("events", "image", "deps", "checkpoint")
Tier = Literal["none", "fuse", "privileged"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The source of a volume: a claim, a directory of the node, or the pod itself."""

    kind: Literal["claim", "host", "pod"] = "pod"
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one injection.

    `parts`: what the wrapper does besides starting the job. `store`: where snapshots are kept, a
    place, or a URL if `store_url` is set. `container`: which one is the job; "" = to be found.
    `command`: the job's command where the manifest leaves it to the image; `commands` are those
    of single containers, by `POD/CONTAINER` or `KIND/POD/CONTAINER`. `job_uid`: what names the
    start of all pods; "" = what their operators set.
    """

    image: str = f"bootseer-init:{__version__}"
    parts: tuple[Part, ...] = PARTS
    tier: Tier = "none"
    container: str = ""
    command: tuple[str, ...] = ()
    commands: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    events: Place = Place()
    store: Place | None = None
    store_url: str = ""
    cache: Place | None = None
    config_map: str = ""
    fuse_resource: str = ""
    pull_policy: str = ""
    job_uid: str = ""
