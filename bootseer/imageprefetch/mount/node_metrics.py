"""What a node's image servers and its link are doing, as metrics."""

from __future__ import annotations

import contextlib
import os

from bootseer.blocks.link_turns import KINDS, LinkTurns
from bootseer.exposition import format_metric
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.server_registry import ServerRecord
from bootseer.system.processes import children_of

_STATES = ("serving", "complete", "ending", "dead")


def collect(runtime: str) -> str:
    """Metrics of the images that are mounted by this runtime directory."""
    servers = server_registry.list_records(runtime)
    states = dict.fromkeys(_STATES, 0)
    for server in servers:
        states[_state_of(server)] += 1
    memory = [_resident_bytes(server.supervisor) for server in servers if not server.sealed]
    with LinkTurns.of(runtime) as turns:
        taken = [({"by": name}, turns.is_taken((name,))) for name in KINDS]
    return "".join(
        [
            format_metric(
                "image_servers",
                "Servers of images by state; complete ones need no process",
                [({"state": state}, count) for state, count in states.items()],
            ),
            format_metric("image_mounts", "Mounts of images", [({}, count_mounts(runtime))]),
            format_metric(
                "image_server_resident_bytes",
                "Memory of all servers of images",
                [({}, sum(memory))],
            ),
            format_metric(
                "link_taken", "1 while a start needs the link: see the docs of starts", taken
            ),
        ]
    )


def count_mounts(runtime: str) -> int:
    """How many trees of images are mounted in this mount namespace."""
    servers = server_registry.list_records(runtime)
    return sum(len(server_registry.mounts_of(server)) for server in servers)


def _state_of(server: ServerRecord) -> str:
    if server.sealed:
        return "complete"
    if not server_registry.is_serving(server):
        return "ending"
    return "serving" if server_registry.is_alive(server) else "dead"


def _resident_bytes(supervisor: int) -> int:
    """Memory of a supervisor and its children."""
    total = 0
    with contextlib.suppress(OSError):
        for process in (supervisor, *children_of(supervisor)):
            with open(f"/proc/{process}/statm", encoding="ascii") as file:
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
