"""A real Kubernetes for tests. Ask for these fixtures by name; every test module has them.

`k8s`        One node of this test process's own (`tools.k8s.cluster.Cluster`), started by the
             first test that asks, ended with the last module in a row that has such tests: an
             idle node costs a tenth of a processor. `k8s.kubectl(...)`, `k8s.get(...)`,
             `k8s.shared` (a folder of this machine that pods reach as a hostPath). Its registry
             holds `lab/python:1`, `lab/bare:1` and `bootseer-init:1` (`IMAGE`).
`namespace`  A namespace of this test's own, removed after it.
`api`        The API server alone, of one module's own, for server-side checks of manifests.

A cluster that cannot start fails the test. Mark such modules `pytest.mark.slow` and `root`.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NODE = pytest.StashKey[tuple[Any, contextlib.ExitStack]]()
REGISTRY = "127.0.0.1:5055"
IMAGE = f"{REGISTRY}/bootseer-init:1"
PYTHON, BARE = f"{REGISTRY}/lab/python:1", f"{REGISTRY}/lab/bare:1"


@pytest.fixture(scope="session")
def init_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.initimage.__main__ import build

    target = tmp_path_factory.mktemp("image") / "init.tar"
    build(target, IMAGE, level=1)  # packed several times faster than the real one
    return target


@pytest.fixture(scope="module")
def k8s(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, init_image: Path
) -> Any:
    stash = request.config.stash
    if NODE not in stash:
        with contextlib.ExitStack() as until_ended:
            cluster = until_ended.enter_context(_node(tmp_path_factory.mktemp("k8s"), init_image))
            stash[NODE] = cluster, until_ended.pop_all()
    return stash[NODE][0]


def end_node(config: pytest.Config) -> None:
    """End this process's node, if one runs; the next test that asks starts another."""
    if NODE in config.stash:
        _, until_ended = config.stash[NODE]
        del config.stash[NODE]
        until_ended.close()


@contextlib.contextmanager
def _node(work: Path, init_image: Path) -> Iterator[Any]:
    from tools.initimage.__main__ import default_cache
    from tools.k8s import images
    from tools.k8s.cluster import Cluster

    python, bare = work / "python.tar", work / "bare.tar"
    images.python_image(python, work, default_cache())
    images.bare_image(bare, work)
    held = {"bootseer-init:1": init_image, "lab/python:1": python, "lab/bare:1": bare}
    try:
        with Cluster(work / "cluster", images=held) as cluster:
            yield cluster
    finally:
        shutil.rmtree(work, ignore_errors=True)


@pytest.fixture
def namespace(k8s: Any) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    k8s.kubectl("create", "namespace", name)
    k8s.wait_for(lambda: k8s.get("serviceaccounts", "-n", name)["items"], "a service account")
    yield name
    k8s.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tools.k8s.cluster import Cluster

    work = tmp_path_factory.mktemp("api")
    try:
        with Cluster(work / "cluster", api_only=True) as cluster:
            yield cluster
    finally:
        shutil.rmtree(work, ignore_errors=True)
