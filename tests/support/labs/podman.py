"""A podman for tests that shares nothing with the machine's. Every test module has it.

`podman`   One (`tools.podman.Podman`) for this test process, shared by all its tests; runtime
           runc, no network in containers, the `registry` of labs.registry trusted.
           `podman.pull(ref)`, `podman.run(ref, "python3", "-c", …)`,
           `podman.run_rootfs(tree, …)` (a throw-away overlay over it),
           `with podman.mounted(ref) as tree:` (what podman itself unpacked),
           `with podman.service() as url:` (`unix://…`, for the `docker` package),
           `podman("any", "podman", "words")`, `podman.trust(host)` for further registries,
           `podman.log_in(registry.auth_json())`.

Mark such tests `root` and `slow`. All containers, mounts and folders go at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def podman(registry: Any) -> Iterator[Any]:
    from tools.podman import Podman

    # A short path: unix sockets have 108 bytes for theirs.
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    with Podman(folder, trusted=[registry.host]) as made:
        yield made
