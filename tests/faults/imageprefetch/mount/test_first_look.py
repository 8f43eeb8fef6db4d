"""The first look at a registry, which a job waits for: bounded whatever the registry does.

A real registry stands behind a FAKE that hangs, or sends a byte a second, at one request.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptDataError, DeadlineError, StoreUnavailableError
from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.resolve import deadline, registry_helper
from bootseer.imageprefetch.resolve.deadline import FirstLook
from bootseer.imageprefetch.resolve.resolver import Resolver
from bootseer.storage.oci.media_types import BLOCK_IMAGE, META
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.retry import retry_call
from tests.support.labs.registry_proxy import Gate, Tokens, isolate
from tests.support.labs.web_servers import Request, head
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.samples.images import Image, directory, file, symlink, write_layout
from tests.support.waiting import until

pytestmark = [pytest.mark.slow]

FILES = some_files()
PARTS = ("token", "name", "referrers", "fallback tag", "block image", "hot set", "pack")
FAULTS = ("hangs", "drips")
HELPED = [(part, fault, False) for part in PARTS for fault in FAULTS]
HELPED += [(part, "drips", True) for part in ("name", "pack")]


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("look/hot", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot={"": sorted(FILES)[:12]})


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def gate(registry: Any) -> Iterator[Gate]:
    with Gate(registry.host) as made:
        yield made


def address_of(part: str, image: Published) -> str:
    """What only the request for this part of the look has in its address."""
    with open_repository(image.ref)[0] as repository:
        (block,) = repository.referrers(image.digest, BLOCK_IMAGE)
    return {
        "token": "/token",
        "name": "/manifests/1",
        "referrers": "/referrers/",
        "fallback tag": "/manifests/sha256-",
        "block image": f"/manifests/{block.digest}",
        "hot set": f"/manifests/{image.hot_sets['']}",
        "pack": f"/blobs/{image.packs['']}",
        "metadata": f"/blobs/{image.blobs[META]}",
    }[part]


class Fault:
    """FAKE: a rule that never finishes answering requests whose address has `part`.

    It `hangs`, or sends the head of an answer a byte a second (`drips`), until `over`.
    """

    def __init__(self, gate: Gate, kind: str, part: str) -> None:
        self._gate, self._kind, self._part = gate, kind, part
        self.struck, self.over = threading.Event(), threading.Event()

    def rule(self, sock: Any, request: Request) -> bool | None:
        if self._part not in request.target or self.over.is_set():
            return None
        self.struck.set()
        while not (self.over.wait(0.2) or self._gate.ended.is_set()):
            if self._kind == "drips":
                sock.sendall(b"H")
        return False


def looked(resolver: Resolver) -> None:
    opened = resolver.open(resolver.digest())
    if opened.image.frames is not None:
        opened.image.frames.close()


@pytest.mark.parametrize(("part", "fault", "helped"), HELPED)
@pytest.mark.root
@pytest.mark.debian("docker-registry")
def test_a_look_ends_in_time_at_whichever_request_the_registry_fails(
    part: str,
    fault: str,
    helped: bool,
    image: Published,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(deadline, "ANSWER_S", 0.2)
    ref = image.ref.replace(image.ref.partition("/")[0], gate.authority)
    bad = Fault(gate, fault, address_of(part, image))
    tokens = Tokens()
    gate.rules = [bad.rule, *([tokens.rule] if part == "token" else [])]
    link = None
    if helped:
        link = registry_helper.start(ref, workload="", plain_http=None, options=lambda: DEFAULTS)
    resolver = Resolver.begin(
        ref,
        ImageCache(str(tmp_path)),
        options=StoreOptions(retry_s=0.0),
        look_s=60,
        spare_meta=str(tmp_path / "metadata"),
        note=print,
        helper=link,
    )

    def hurry() -> None:
        bad.struck.wait()
        resolver.look.limit_s = 0.2
        resolver.look.restart()

    hurrying = threading.Thread(target=hurry, daemon=True)
    hurrying.start()
    with pytest.raises(
        DeadlineError, match=f"{ref} has not given all that .* hangs or is too slow"
    ):
        looked(resolver)
    assert bad.struck.is_set()
    hurrying.join()
    resolver.dismiss_helper()
    bad.over.set()
    for thread in threading.enumerate():
        if thread.name == "store-call":  # what was left behind
            thread.join(60)
    resolver.repository.close()


class Spoiled:
    """FAKE: a rule by which all requests for one blob hang until `over`, or get a spoilt answer."""

    def __init__(self, gate: Gate, digest: str, fault: str) -> None:
        self._gate, self._digest, self._fault = gate, digest, fault
        self.struck, self.over = threading.Event(), threading.Event()

    def rule(self, sock: Any, request: Request) -> bool | None:
        if self._digest not in request.target:
            return None
        self.struck.set()
        if self._fault == "late":
            until(lambda: self.over.is_set() or self._gate.ended.is_set(), "the fault's end")
            return None
        if self._fault != "flipped":
            sock.sendall(head(f"{self._fault} Oh", Content_Length=2) + b"{}")
            return True
        status, reason, headers, body = self._gate.ask(request)
        sock.sendall(head(f"{status} {reason}", **headers) + body[:-1] + bytes((body[-1] ^ 1,)))
        return True


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("fault", ["404", "401", "500", "flipped", "late"])
@pytest.mark.root
@pytest.mark.debian("docker-registry")
def test_no_mount_depends_on_the_config_of_an_image_alone(
    fault: str,
    helped: bool,
    image: Published,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for the platform alone; an answer that is late comes after the look."""
    isolate(tmp_path, monkeypatch)
    ref = image.ref.replace(image.ref.partition("/")[0], gate.authority)
    with open_repository(image.ref)[0] as repository:
        bad = Spoiled(gate, repository.image("1")[1].config.digest, fault)
    gate.rules = [bad.rule]
    link = None
    if helped:
        link = registry_helper.start(ref, workload="", plain_http=None, options=lambda: DEFAULTS)
    resolver = Resolver.begin(
        ref,
        ImageCache(str(tmp_path)),
        spare_meta=str(tmp_path / "metadata"),
        note=print,
        helper=link,
    )
    opened = resolver.open(resolver.digest())
    assert bad.struck.is_set()
    assert not bad.over.is_set()
    bad.over.set()
    assert opened.hot_set == image.packs[""], "the hot set is used as ever"
    assert opened.image.frames is not None
    opened.image.frames.close()
    resolver.dismiss_helper()
    for thread in threading.enumerate():
        if thread.name in ("image-ask", "store-call"):  # what was left behind
            thread.join(60)
    resolver.repository.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.root
@pytest.mark.debian("docker-registry")
def test_what_is_here_is_mounted_without_a_registry_that_fails(
    fault: str, image: Published, gate: Gate, mounts: Mounts
) -> None:
    ref = image.ref.replace(image.ref.partition("/")[0], gate.authority)
    first = mounts.mount(ref)
    name, kept = parse_reference(ref).name, ImageCache(str(mounts.cache))
    until(lambda: kept.read_pin(name))  # written behind the mount
    mounts.umount(first)
    bad = Fault(gate, fault, "/manifests/")
    gate.rules = [bad.rule]
    made = mounts.mount(ref)
    assert bad.struck.is_set()
    assert made.offline
    assert tree_of(made.directory) == FILES


@pytest.mark.root
@pytest.mark.debian("docker-registry")
def test_a_registry_that_is_far_away_is_looked_at_for_longer(
    image: Published, gate: Gate, mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes 0.3 s and its body comes at 1 Mbit/s: in all longer than the look."""
    monkeypatch.setattr(deadline, "ANSWER_S", 60.0)
    monkeypatch.setattr(deadline, "EXTRA_S", 600.0)

    mounted = threading.Event()

    def far(sock: Any, request: Request) -> bool:
        status, reason, headers, body = gate.ask(request)
        time.sleep(0.3)
        sock.sendall(head(f"{status} {reason}", **headers))
        for at in range(0, len(body), 12_500):
            sock.sendall(body[at : at + 12_500])
            mounted.wait(0.1)
        return True

    gate.rules = [far]
    ref = image.ref.replace(image.ref.partition("/")[0], gate.authority)
    made = mounts.mount(ref, look_s=0.5)
    mounted.set()
    gate.rules = []
    assert (made.offline, made.hot_set) == (False, image.packs[""])
    assert tree_of(made.directory) == FILES


class Pieces:
    """FAKE: a stream that brings its pieces with a pause before each."""

    def __init__(self, pieces: list[bytes], pause_s: float) -> None:
        self._pieces, self._pause_s = pieces, pause_s
        self.cancelled = threading.Event()

    def readinto(self, view: memoryview, /) -> int:
        if self.cancelled.wait(self._pause_s) or not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        view[: len(piece)] = piece
        return len(piece)

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_body_may_take_as_long_as_enough_of_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "ANSWER_S", 0.5)
    look = FirstLook("a place", 0.0, lambda: None)
    stream: Any = Pieces([b"x" * 1_000_000] * 8, 0.1)
    assert look.read(stream, 8_000_000, "read it", whole=True) == b"x" * 8_000_000
    assert not look.given_up
    stream = Pieces([b"x"] * 100_000, 0.1)
    with pytest.raises(DeadlineError, match="cannot read it: a place has not given"):
        look.read(stream, 100_000, "read it", whole=False)
    assert look.given_up
    assert stream.cancelled.is_set()


@pytest.mark.parametrize("pieces", [[b"xx"], [b"xxxx", b"x"]])
def test_a_body_of_another_size_is_refused(pieces: list[bytes]) -> None:
    look, stream = FirstLook("a place", 60.0, lambda: None), Pieces(pieces, 0.0)
    with pytest.raises(CorruptDataError, match=r"2 bytes instead of 4|more than 4"):
        look.read(stream, 4, "read it", whole=True)  # type: ignore[arg-type]


def busybox_image(folder: Path, name: str) -> Any:
    tools = [file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)]
    made = Image(
        [[directory("bin"), *tools, symlink("bin/echo", "busybox"), file("name", name.encode())]],
        config={"Env": ["PATH=/bin"], "Cmd": ["echo", "it", "began"]},
    )
    return write_layout(folder / "layout", made, tag="1")


@pytest.mark.parametrize(
    ("part", "fault", "why"),
    [
        ("/manifests/1", "drips", "cannot find the image 1"),
        ("/manifests/sha256-", "hangs", "cannot list the referrers of"),
        ("/blobs/", "drips", "cannot read sha256:"),
    ],
)
@pytest.mark.root
@pytest.mark.debian("podman")
@pytest.mark.debian("docker-registry")
@pytest.mark.debian("busybox-static")
def test_a_job_starts_plainly_where_the_first_look_is_in_vain(
    part: str, fault: str, why: str, gate: Gate, podman: Any, registry: Any, mounts: Mounts
) -> None:
    name = f"look/{fault}{len(part)}"
    made = busybox_image(mounts.folder, name)
    pushed = registry.push(made.source, name, "1")
    build_image(BuildSettings(ref=pushed, cache_dir=str(mounts.folder / "build")))
    ref = f"{gate.authority}/{name}:1"
    podman.pull(pushed)
    podman("tag", pushed, ref)
    bad = Fault(gate, fault, part)
    gate.rules = [bad.rule]
    events = mounts.folder / "events"
    environment = {
        **podman.environment,
        "BOOTSEER_CACHE": str(mounts.cache),
        "BOOTSEER_RUNTIME": str(mounts.runtime),
        "BOOTSEER_EVENTS": str(events),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "image", "run", ref],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "it began\n"), done.stderr
    assert bad.struck.is_set()
    assert f"bootseer: podman pulls the image: {why}" in done.stderr
    assert "its registry hangs or is too slow" in done.stderr
    told = "".join(path.read_text() for path in events.iterdir())
    assert "its registry hangs or is too slow" in told
    assert mounts.gone()


def test_a_registry_that_refuses_is_named_as_such_when_the_look_ends() -> None:
    """Its tries would go on for longer than the look, whose end is not the cause."""
    given_up = threading.Event()
    tries = []

    def refused() -> None:
        tries.append(time.monotonic())
        raise StoreUnavailableError("r:1 is not reachable (Connection refused)")

    look = FirstLook("r:1/a", 0.5, given_up.set)
    with pytest.raises(
        StoreUnavailableError, match=r"^r:1 is not reachable \(Connection refused\)"
    ):
        look.ask(lambda: retry_call(refused, retry_s=60), "find the image 1")
    assert not given_up.is_set()
    assert len(tries) > 1
