"""Mounted images whose registry fails in the middle: through a gate that spoils its answers."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptDataError
from bootseer.imageprefetch import image_cache
from bootseer.storage.oci.manifest import Platform, index_bytes
from bootseer.storage.oci.media_types import DATA, OCI_INDEX
from bootseer.storage.options import StoreOptions
from tests.support.labs.registry_proxy import Gate, Rule, Tokens, isolate, opened
from tests.support.labs.web_servers import head, reset
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(24, 400_000)
NAMES = sorted(FILES)
HOT = NAMES[:12]
QUICK = StoreOptions(connect_s=3.0, stall_s=1.0, retry_s=20.0)


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    # A name of its own: made anew for a worker that comes back, it must not meet its first hot set.
    ref = registry.reference(f"gates/image-{uuid.uuid4().hex[:8]}", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot={"": HOT})


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def gate(registry: Any) -> Iterator[Gate]:
    with Gate(registry.host) as gate:
        yield gate


def through(gate: Gate, registry: Any, image: Published) -> str:
    return image.ref.replace(registry.host, gate.authority)


class Within:
    """`rule` for the first `times` requests whose address holds `part`."""

    def __init__(self, part: str, times: int, rule: Rule) -> None:
        self.part, self.times, self.rule = part, times, rule
        self.struck = 0
        self._lock = threading.Lock()

    def __call__(self, sock: Any, request: Any) -> bool | None:
        with self._lock:
            other = request.method != "GET" or self.part not in request.target
            if other or self.struck == self.times:
                return None
            self.struck += 1
        return self.rule(sock, request)


def answer(status: str, **headers: object) -> Rule:
    def answered(sock: Any, request: Any) -> bool:
        sock.sendall(head(status, Content_Length=2, **headers) + b"{}")
        return True

    return answered


def half(gate: Gate, end: Callable[[Any], object] | None = None) -> Rule:
    """Half of the body, and then the connection's end."""

    def cut(sock: Any, request: Any) -> bool:
        status, reason, headers, body = gate.ask(request)
        sock.sendall(head(f"{status} {reason}", **headers) + body[: len(body) // 2])
        if end is not None:
            end(sock)
        return False

    return cut


def flipped(gate: Gate) -> Rule:
    def flip(sock: Any, request: Any) -> bool:
        status, reason, headers, body = gate.ask(request)
        spoiled = bytearray(body)
        spoiled[len(spoiled) // 2] ^= 1
        sock.sendall(head(f"{status} {reason}", **headers) + spoiled)
        return True

    return flip


FAULTS: dict[str, Callable[[Gate, threading.Event], Rule]] = {
    "429": lambda gate, ended: answer("429 Slow Down", Retry_After=0),
    "500": lambda gate, ended: answer("500 Oh"),
    "503": lambda gate, ended: answer("503 Soon"),
    "cut": lambda gate, ended: half(gate),
    "reset": lambda gate, ended: half(gate, reset),
    "flipped": lambda gate, ended: flipped(gate),
    "hangs": lambda gate, ended: lambda sock, request: bool(ended.wait(60)) and False,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("hot", [False, True])
def test_a_registry_that_fails_for_a_while_costs_time_only(
    mounts: Mounts, gate: Gate, registry: Any, image: Published, fault: str, hot: bool
) -> None:
    """Demand reads without a hot set; the stream of the pack, and what lacks then, with it."""
    ended = threading.Event()
    rule = Within(image.packs[""] if hot else image.blobs[DATA], 2, FAULTS[fault](gate, ended))
    try:
        if not hot:
            mounted = mounts.mount(through(gate, registry, image), hot=False, options=QUICK)
            gate.rules = [rule]
        else:
            gate.rules = [rule]
            mounted = mounts.mount(through(gate, registry, image), options=QUICK)
        assert tree_of(mounted.directory) == FILES
        assert rule.struck
    finally:
        ended.set()


@pytest.mark.parametrize("status", ["401 No", "403 No", "404 No"])
def test_what_a_registry_refuses_is_an_error_until_it_gives_it(
    mounts: Mounts,
    gate: Gate,
    registry: Any,
    image: Published,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = mounts.folder / "events"
    folder.mkdir()
    monkeypatch.setenv("BOOTSEER_EVENTS", str(folder))
    mounted = mounts.mount(through(gate, registry, image), hot=False, deadline_s=2.0)
    gate.rules = [Within(image.blobs[DATA], 10**6, answer(status))]
    with pytest.raises(OSError, match="Input/output error"):
        (Path(mounted.directory) / NAMES[0]).read_bytes()
    # Of reads that fail at once the first tells; another may be answered before that is written.
    until(lambda: "image.fault" in "".join(path.read_text() for path in folder.iterdir()))
    gate.rules = []
    assert tree_of(mounted.directory) == FILES


def test_a_token_that_ends_in_the_middle_is_renewed(
    mounts: Mounts, gate: Gate, registry: Any, image: Published
) -> None:
    tokens = Tokens()
    gate.rules = [tokens.rule]
    mounted = mounts.mount(through(gate, registry, image), hot=False)
    before = len(tokens.issued)
    tokens.dead.update(tokens.issued)
    assert tree_of(mounted.directory) == FILES
    assert len(tokens.issued) > before


@pytest.mark.parametrize("fault", ["500 Oh", "403 No", "404 No", "hangs"])
@pytest.mark.parametrize("part", ["pack", "manifest"])
def test_a_hot_set_that_cannot_be_had_costs_itself_only(
    mounts: Mounts, gate: Gate, registry: Any, image: Published, fault: str, part: str
) -> None:
    ended = threading.Event()
    hang: Rule = lambda sock, request: bool(ended.wait(60)) and False  # noqa: E731
    digest = image.packs[""] if part == "pack" else image.hot_sets[""]
    rule = Within(digest, 10**6, hang if fault == "hangs" else answer(fault))
    gate.rules = [rule]
    try:
        options = StoreOptions(stall_s=1.0, retry_s=1.0)
        mounted = mounts.mount(through(gate, registry, image), options=options)
        assert mounted.hot_set == ""
        gone = (part, fault) == ("manifest", "404 No")  # removed since it was listed
        assert gone or any("the hot set is not used" in note for note in mounted.notes)
        assert rule.struck
        assert tree_of(mounted.directory) == FILES
    finally:
        ended.set()


def test_a_mount_is_ready_in_few_round_trips(
    mounts: Mounts, gate: Gate, registry: Any, image: Published
) -> None:
    """The name, who refers to it, both manifests side by side, and the pack's one stream.

    Beside these, where no index names the image, its config: it tells for which machine it is.
    This registry does not know the referrers API, so its tag is asked for as well.
    """
    mounted = mounts.mount(through(gate, registry, image))
    assert mounted.hot_set
    asked = [r.target for r in gate.requests if image.blobs[DATA] not in r.target]
    assert len(asked) == 7, asked
    bare = Mounts(mounts.folder / "bare")
    bare.folder.mkdir()
    before = len(gate.requests)
    try:
        bare.mount(through(gate, registry, image), hot=False)
        asked = [r.target for r in gate.requests[before:] if image.blobs[DATA] not in r.target]
        assert len(asked) <= 7, asked  # no pack, but metadata and table side by side
    finally:
        bare.clear()


def test_an_index_by_its_digest_is_mounted_with_its_registry_gone(
    mounts: Mounts, own_registry: Any, tmp_path: Path
) -> None:
    registry = own_registry()
    image = publish(registry.reference("gates/index", "1"), FILES, tmp_path / "image")
    with opened(image.ref, push=True) as repository:
        made = repository.image("1")[0]
        here = dataclasses.replace(made, platform=Platform("linux", "amd64"))
        index = repository.push_manifest(index_bytes([here]), OCI_INDEX)
    ref = f"{image.ref.removesuffix(':1')}@{index.digest}"
    mounted = mounts.mount(ref)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()
    registry.stop()
    again = mounts.mount(ref, options=QUICK)
    assert again.offline
    assert tree_of(again.directory) == FILES


def test_a_block_image_with_wrong_bytes_is_not_mounted_again_for_a_while(
    mounts: Mounts, gate: Gate, registry: Any, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = through(gate, registry, image)
    mounted = mounts.mount(ref, hot=False, deadline_s=3.0)
    gate.rules = [Within(image.blobs[DATA], 10**6, flipped(gate))]
    with pytest.raises(OSError, match="Input/output error"):
        tree_of(mounted.directory)
    mounts.umount(mounted)
    assert mounts.gone()
    gate.rules = []
    with pytest.raises(CorruptDataError, match="pull the image the plain way"):
        mounts.mount(ref, hot=False)
    monkeypatch.setattr(image_cache, "CONDEMNED_S", 0.0)
    assert tree_of(mounts.mount(ref, hot=False).directory) == FILES


@pytest.mark.parametrize("killed", [False, True])
def test_the_kernel_reads_ahead_once_a_start_is_over(
    mounts: Mounts, image: Published, killed: bool
) -> None:
    """Also where nothing was recorded, and where the server is another by then."""
    mounts.mount(image.ref, hot=False, loop=killed, record_window_s=2.0 if killed else 0.2)
    server = mounts.server()
    assert server.bdis
    if killed:
        os.kill(mounts.worker(server), signal.SIGKILL)
    files = [Path(f"/sys/class/bdi/{bdi}/read_ahead_kb") for bdi in server.bdis]
    until(lambda: all(file.read_text() == "128\n" for file in files))
