"""containerd's own test suite for snapshotters, run against ours over its socket.

What it checks, by its own names, and where the same is found among our tests in words:

Basic                       prepare, write, commit, stack, view, remove in order, refuse the rest
StatActive, StatComitted    what Stat says of each kind
TransitivityTest            parents' names along a chain
PreareViewFailingtest       keys that exist, parents that do not or are not committed
Update                      labels by field path; everything else refused
Remove                      keys free again after removal, in any state
Walk                        list, and every filter: name, parent, kind, labels
LayerFileupdate, RemoveDirectoryInLowerLayer, Chown, DirectoryPermissionOnCommit,
DeletedFilesInChildSnapshot, MoveFileFromLowerLayer
                            what overlays show of layers that change each other's files
RemoveIntermediateSnapshot  a parent cannot go before its child
ViewReadonly                a view cannot be written to
StatInWalk, CloseTwice, RootPermission, 128LayersMount
Rename                      left out by the suite itself, on every snapshotter
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.imageprefetch.snapshotter.types import INHERITED_PREFIX, TARGET_LABEL
from tests.support.labs.containerd import children_of, start_namespaces, until
from tests.support.labs.snapshotter_client import Client, RefusedError
from tests.support.samples.images import Image, file, write_layout

pytestmark = [pytest.mark.root, pytest.mark.slow]

PASSED = {
    *("Basic", "StatActive", "StatComitted", "TransitivityTest", "PreareViewFailingtest"),
    *("Update", "Remove", "Walk", "LayerFileupdate", "RemoveDirectoryInLowerLayer", "Chown"),
    *("DirectoryPermissionOnCommit", "RemoveIntermediateSnapshot", "DeletedFilesInChildSnapshot"),
    *("MoveFileFromLowerLayer", "ViewReadonly", "StatInWalk", "CloseTwice", "RootPermission"),
    "128LayersMount",
}


class Served(NamedTuple):
    """A snapshotter; `inside` stands before a command that is to see its mounts."""

    socket: Path
    inside: list[str]


@contextlib.contextmanager
def serve(folder: Path, *options: str) -> Iterator[Served]:
    """The snapshotter with its root and socket in a folder; its log is there as `said`.

    In namespaces of its own: what it leaves mounted, and its helpers, go with them.
    """
    path = folder / "snap.sock"
    words = ["--root", str(folder / "root"), "--address", str(path), *options]
    environment = {**os.environ, "BOOTSEER_CACHE": str(folder / "cache")}
    init, inside = start_namespaces()
    child = None
    try:
        command = [*inside, sys.executable, "-m", "bootseer", "snapshotter", *words]
        with (folder / "said").open("wb") as log:
            child = subprocess.Popen(command, stderr=log, env=environment)
        until(lambda: "listening" in (folder / "said").read_text(), "the snapshotter")
        yield Served(path, inside)
        os.kill(int(children_of(child.pid)[0]), signal.SIGTERM)
        assert child.wait() == 0
    finally:
        if child is not None:
            child.kill()
            child.wait()
        init.kill()
        init.wait()


def check_suite(socket_path: Path, folder: Path, **environment: str) -> None:
    """Run containerd's suite; all of its tests pass, and it leaves out what it always does."""
    from tools.containerd import suite

    work = folder / "work"
    work.mkdir()
    # In namespaces of its own: what a failed test leaves mounted goes with it.
    isolated = ["unshare", "--mount", "--propagation", "private", "setpriv", "--pdeathsig", "KILL"]
    places = {"SNAPSHOTTER_SOCKET": str(socket_path), "TMPDIR": str(work)}
    done = subprocess.run(
        [*isolated, str(suite.program()), "-test.v"],
        env={**os.environ, **places, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = set(re.findall(r"--- PASS: TestSnapshotter/(\S+)", done.stdout))
    assert passed == PASSED, done.stdout[-3000:]
    assert re.findall(r"--- SKIP: \S+/(\S+)", done.stdout) == ["Rename"]
    assert done.returncode == 0


@pytest.mark.debian("golang-github-containerd-containerd-dev")
def test_containerds_own_suite_passes_the_plain_way(tmp_path: Path) -> None:
    with serve(tmp_path, "--plain") as served:
        check_suite(served.socket, tmp_path)


@pytest.mark.debian("golang-github-containerd-containerd-dev")
def test_containerds_own_suite_passes_with_lazy_images(registry: Any, tmp_path: Path) -> None:
    """Every snapshot is asked for as a layer of an image that the registry is asked about.

    It has no block image, so each is handed to the plain way; before the suite and after it, one
    that has is there at once, and its files are read from its block image.
    """
    pushed, layers = {}, {}
    for name in ("stock", "lazy"):
        layer = [file("here", f"{name} {'x' * 5000}".encode())]
        layout = write_layout(tmp_path / name, Image([layer]), tag="1")
        pushed[name] = str(registry.push(layout.source, f"suite/{name}", "1"))
        (layers[name],) = layout.layers()
    build_image(BuildSettings(ref=pushed["lazy"], cache_dir=str(tmp_path / "build")))
    runtime = ("--runtime", str(tmp_path / "runtime"))
    with serve(tmp_path, "--no-fill", *runtime) as served:
        check_lazy(served, "before", pushed["lazy"], layers["lazy"].digest)
        before = len(registry.requests())
        pulled = {"SNAPSHOTTER_IMAGE": pushed["stock"], "SNAPSHOTTER_LAYER": layers["stock"].digest}
        check_suite(served.socket, tmp_path, **pulled)
        asked = [r.path for r in registry.requests()[before:] if "suite/stock" in r.path]
        assert asked
        said = (tmp_path / "said").read_text().splitlines()
        plainly = [line for line in said if f"{pushed['stock']}: handed to the plain way" in line]
        assert plainly  # said once an image, whatever the number of its layers
        assert any("no block image" in line for line in plainly)
        check_lazy(served, "after", pushed["lazy"], layers["lazy"].digest)


def check_lazy(served: Served, key: str, ref: str, layer: str) -> None:
    """A layer of the image exists without a fetch; a container's mount shows its file."""
    client = Client(served.socket)
    target = f"sha256:{key}"
    family = f"{INHERITED_PREFIX}remote/stargz"
    labels = {TARGET_LABEL: target, f"{family}.reference": ref, f"{family}.digest": layer}
    try:
        with pytest.raises(RefusedError) as refused:
            client.prepare(key, labels=labels)
        assert refused.value.code == "ALREADY_EXISTS"
        (mount,) = client.view(f"{key}-view", target)
        read = [*served.inside, "cat", f"{mount.source}/here"]
        assert subprocess.run(read, stdout=subprocess.PIPE, check=True).stdout.startswith(b"lazy ")
        client.remove(f"{key}-view")
        client.remove(target)
    finally:
        client.close()
