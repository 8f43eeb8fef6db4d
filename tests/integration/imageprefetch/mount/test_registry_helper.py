"""The process that asks the registry for a mount: with it, without it, or with half of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from _socket import SHUT_WR, socket, socketpair
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bootseer
from bootseer.errors import BootseerError
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.imageprefetch.resolve import helped_repository, registry_helper
from bootseer.imageprefetch.resolve.helped_repository import HelpedRepository
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import DEFAULTS
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request
from tests.support.mounts.images import (
    Mounts,
    Published,
    begun_with,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files()
HOT = sorted(FILES)[:12]


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("helper/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot={"": HOT})


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


def helper_for(image: Published) -> socket:
    return registry_helper.start(image.ref, workload="", plain_http=None, options=lambda: DEFAULTS)


def all_of(repository: Any, version: str) -> tuple[Any, ...]:
    """What a mount asks, in its order."""
    described, manifest = repository.image(version)
    listed = repository.referrers(described.digest)
    found = {one.artifact_type: repository.manifest(one) for one in listed}
    (hot,) = (made for kind, made in found.items() if "hotset" in kind)
    with repository.stream(hot.layers[0].digest, verify=False) as stream:
        data = stream.read()
    return described, manifest, listed, sorted(found.items()), data


@contextlib.contextmanager
def counting(image: Published) -> Iterator[tuple[list[int], Any]]:
    """Opens the repository itself, and tells how often that was asked for."""
    asked: list[int] = []

    def opened() -> Any:
        asked.append(1)
        return open_repository(image.ref)[0]

    yield asked, opened


def test_a_helper_answers_all_that_a_mount_asks(image: Published) -> None:
    with open_repository(image.ref)[0] as plain:
        expected = all_of(plain, "1")
    with counting(image) as (asked, opened), HelpedRepository(helper_for(image), opened) as helped:
        assert all_of(helped, "1") == expected
        assert not asked
        assert helped.blob(expected[1].config, limit_bytes=4096)
        assert asked == [1]  # what the helper does not know


def test_a_config_that_is_kept_is_not_fetched_again(
    image: Published, registry: Any, tmp_path: Path
) -> None:
    """FAKE: a gate that counts the requests for the config."""
    asked: list[str] = []
    with open_repository(image.ref)[0] as plain:
        described, manifest = plain.image("1")

    def count(_: Any, request: Request) -> bool | None:
        if manifest.config.digest in request.target:
            asked.append(request.target)
        return None

    with Gate(registry.host) as gate:
        gate.rules = [count]
        for _ in range(2):
            link = registry_helper.start(
                image.ref.replace(registry.host, gate.authority),
                workload="",
                plain_http=None,
                options=lambda: DEFAULTS,
                keep_config_in=str(tmp_path),
            )
            with contextlib.closing(link):
                while helped_repository._receive(link)[0] != registry_helper.READY:
                    pass
                link.shutdown(SHUT_WR)
                assert link.recv(1) == b""  # it has ended, and with it its requests
            assert ImageCache(str(tmp_path)).config(described.digest)
    assert len(asked) == 1


def test_a_config_that_comes_late_is_no_part_of_the_stream(image: Published, registry: Any) -> None:
    """FAKE: a gate that answers for the config once the helper is ready."""
    come, answered = threading.Event(), threading.Event()
    with open_repository(image.ref)[0] as plain:
        expected = all_of(plain, "1")
    config = expected[1].config.digest

    def late(sock: Any, request: Request) -> bool | None:
        if config not in request.target:
            return None
        until(come.is_set, "the helper")
        kept = gate.forward(sock, request)
        answered.set()
        return kept

    with Gate(registry.host) as gate:
        gate.rules = [late]
        ref = image.ref.replace(registry.host, gate.authority)
        link = registry_helper.start(ref, workload="", plain_http=None, options=lambda: DEFAULTS)
        with counting(image) as (asked, opened), HelpedRepository(link, opened) as helped:
            assert helped.image("1")[1] == expected[1]
            assert helped.config(config) is None
            come.set()
            until(answered.is_set, "the config")
            assert all_of(helped, "1") == expected
            assert not asked


class Cut:
    """Fault injection: passes the helper's bytes on until so many, then ends the link."""

    def __init__(self, link: socket, after_bytes: int) -> None:
        self.ours, self._theirs = socketpair()
        self._link, self._left = link, after_bytes
        self.struck = False
        self._threads = [
            threading.Thread(target=body, daemon=True) for body in (self._down, self._up)
        ]
        for thread in self._threads:
            thread.start()

    def _down(self) -> None:
        while data := self._link.recv(4096):
            self._theirs.sendall(data[: self._left])
            self._left -= len(data)
            if self._left <= 0:
                self.struck = True
                break
        registry_helper.shut(self._theirs)
        registry_helper.shut(self._link)

    def _up(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._theirs.recv(4096):
                self._link.sendall(data)
        registry_helper.shut(self._link)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._link.close()
        self._theirs.close()


@pytest.mark.parametrize("after_bytes", [1, 3, 30, 700, 1500, 2500, 100_000, 1_000_000])
def test_what_a_helper_leaves_out_is_asked_of_the_registry(
    image: Published, after_bytes: int
) -> None:
    with open_repository(image.ref)[0] as plain:
        expected = all_of(plain, "1")
    cut = Cut(helper_for(image), after_bytes)
    with counting(image) as (asked, opened), HelpedRepository(cut.ours, opened) as helped:
        assert all_of(helped, "1") == expected
        assert asked == [1]
    cut.join()
    assert cut.struck


def test_a_helper_that_says_nothing_is_not_waited_for(
    image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helped_repository, "PATIENCE_S", 0.2)
    ours, silent = socketpair()
    with open_repository(image.ref)[0] as plain:
        expected = all_of(plain, "1")
    with counting(image) as (asked, opened), HelpedRepository(ours, opened) as helped:
        assert all_of(helped, "1") == expected
        assert asked == [1]
    assert silent.recv(1) == b""  # nothing was asked of it, and it was ended
    silent.close()


def test_a_manifest_with_other_bytes_is_refused(image: Published) -> None:
    """Fault injection: the helper's words with one byte of a manifest changed."""
    link, (ours, theirs) = helper_for(image), socketpair()
    held = bytearray()
    while b"ready" not in held:
        held += link.recv(65536)
    registry_helper.end(link)
    at = held.index(b'"schemaVersion"')
    held[at + 1] ^= 1
    theirs.sendall(held)
    with counting(image) as (asked, opened), HelpedRepository(ours, opened) as helped:
        with pytest.raises(BootseerError, match="other bytes"):
            helped.image("1")
        assert not asked
    theirs.close()


def test_a_stream_that_is_cancelled_ends(image: Published) -> None:
    with counting(image) as (_, opened), HelpedRepository(helper_for(image), opened) as helped:
        described, _ = helped.image("1")
        (hot,) = (o for o in helped.referrers(described.digest) if "hotset" in o.artifact_type)
        stream = helped.stream(helped.manifest(hot).layers[0].digest, verify=False)  # type: ignore[union-attr]
        assert stream.readinto(memoryview(bytearray(10))) == 10
        stream.cancel()
        with pytest.raises(BootseerError, match="cancelled"):
            stream.read()
        stream.close()


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def mounted(mounts: Mounts, image: Published, name: str) -> dict[str, Any]:
    """What `image mount` says of a mount with a cache of its own; unmounted again."""
    directory = mounts.folder / name
    directory.mkdir()
    bootseer = [sys.executable, "-m", "bootseer", "image"]
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / f"{name}-cache")]
    words += ["--no-fill", "--json"]
    done = subprocess.run(
        [*bootseer, "mount", *words, image.ref, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert tree_of(directory) == FILES
    mounts.umount(str(directory))
    said: dict[str, Any] = json.loads(done.stdout)
    assert said.pop("directory") == str(directory)
    (place,) = (mounts.folder / f"{name}-cache/images").glob("sha256-*")
    trace = TraceStore(place / "traces").load("")
    assert trace is not None
    # What was not hot had to be fetched, so all of it was noted; of the rest, what came too late.
    assert trace.touched_bytes() >= sum(len(FILES[path]) for path in set(FILES) - set(HOT))
    return said


def test_a_mount_is_the_same_with_an_agent_without_one_and_with_a_dead_one(
    mounts: Mounts, image: Published
) -> None:
    bare = mounted(mounts, image, "bare")
    assert bare["hot_set"]
    words = [sys.executable, "-m", "bootseer", "image", "agent", "--runtime", str(mounts.runtime)]
    socket_file = mounts.runtime / "images/agent.sock"
    with subprocess.Popen(words) as agent:
        try:
            while not socket_file.exists():
                assert agent.poll() is None
                time.sleep(0.01)
            assert mounted(mounts, image, "agent") == bare
        finally:
            agent.send_signal(signal.SIGKILL)
    assert socket_file.exists()  # nobody listens there any more
    assert mounted(mounts, image, "dead") == bare
    socket_file.unlink()
    until_s = time.monotonic() + 10
    while processes_of(mounts.folder) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not processes_of(mounts.folder)


def test_no_mount_leaves_an_agent_behind(mounts: Mounts, image: Published) -> None:
    mark = f"BEGUN_BY={mounts.folder}"
    places = ["--runtime", str(mounts.runtime), "--cache", str(mounts.cache)]
    directories = [mounts.folder / name for name in ("first", "shared")]
    environment = {**os.environ, "BEGUN_BY": str(mounts.folder)}
    bootseer = [sys.executable, "-m", "bootseer", "image"]
    for directory in directories:
        directory.mkdir()
        words = [*bootseer, "mount", *places, image.ref, str(directory)]
        subprocess.run(words, env=environment, check=True)
        assert tree_of(directory) == FILES
    server = mounts.server().supervisor
    until(lambda: sorted(begun_with(mark)) == sorted([server, mounts.worker(mounts.server())]))
    assert not list(mounts.runtime.rglob("agent*"))
    for directory in directories:
        words = [*bootseer, "umount", *places[:2], str(directory)]
        subprocess.run(words, env=environment, check=True)
    until(lambda: not begun_with(mark), "the end of all that the commands began")
    assert mounts.gone()
    assert not list(mounts.runtime.rglob("agent*"))


HEAVY = {
    *("click", "http.client", "ssl", "socket", "email", "shutil", "tempfile", "uuid", "pathlib"),
    *("subprocess", "logging", "tomllib", "urllib.parse", "asyncio", "argparse"),
    *("dataclasses", "inspect"),
    *(
        "bootseer.config.loading",
        "bootseer.storage.http.pool",
        "bootseer.storage.oci.registry_repository",
    ),
    *(
        "bootseer.blocks.fetch.fetcher",
        "bootseer.blocks.cache.node_cache",
        "bootseer.blockimage.serve.background_fill",
    ),
    *("bootseer.storage.store", "bootseer.imageprefetch.hotset.local_hotsets"),
    "bootseer.imageprefetch.hotset.local_packer",
    *(
        "bootseer.cli.root",
        "bootseer.imageprefetch.record.trace_store",
        "bootseer.blocks.cache.sealed_objects",
    ),
}


@pytest.mark.parametrize("workload", ["", "w"])
def test_a_bare_mount_imports_no_client_and_no_cache_before_it_is_there(
    workload: str, mounts: Mounts, image: Published
) -> None:
    """Each of these would delay a job; the helper imports the registry's client beside us."""
    directory, told = mounts.folder / "m", mounts.folder / "modules"
    told_hot = mounts.folder / "modules-hot"
    directory.mkdir()
    code = f"""
import os, sys
from bootseer import __main__ as main
from bootseer.imageprefetch.resolve import registry_helper
helper = registry_helper.start
def start(*words, **options):
    link = helper(*words, **options)
    from bootseer.imageprefetch.mount import mount_worker as worker
    hand_over = worker.Worker._hand_over
    def noted(self, *about):
        with open({str(told)!r}, "w") as file:
            file.write(" ".join(sys.modules))
        hand_over(self, *about)
    worker.Worker._hand_over = noted
    hot_done = worker.Worker._hot_done
    def noted_hot_done(self):
        with open({str(told_hot)!r} + ".new", "w") as file:
            file.write(" ".join(sys.modules))
        os.rename({str(told_hot)!r} + ".new", {str(told_hot)!r})
        hot_done(self)
    worker.Worker._hot_done = noted_hot_done
    return link
registry_helper.start = start
sys.exit(main.main(sys.argv[1:]))
"""
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / "cache"), "--no-fill"]
    words += ["--workload", workload] if workload else []
    done = subprocess.run(
        [sys.executable, "-c", code, "image", "mount", *words, image.ref, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert tree_of(directory) == FILES
    modules = set(told.read_text().split())
    assert "bootseer.imageprefetch.resolve.helped_repository" in modules
    assert modules & HEAVY == set()
    until(told_hot.exists, "the hot set's end")
    assert "bootseer.imageprefetch.record.start_recording" in told_hot.read_text().split()
    assert "bootseer.imageprefetch.record.trace_store" not in told_hot.read_text().split()
    mounts.umount(str(directory))


def test_a_mounts_server_collects_garbage_once_the_image_is_there(
    mounts: Mounts, image: Published
) -> None:
    """Not before, for looking for garbage takes time, and importing makes none."""
    directory, told = mounts.folder / "m", mounts.folder / "collecting"
    directory.mkdir()
    code = f"""
import gc, os, sys
from bootseer import __main__ as main
from bootseer.imageprefetch.resolve import registry_helper
helper = registry_helper.start
def start(*words, **options):
    link = helper(*words, **options)
    from bootseer.imageprefetch.mount import mount_worker as worker
    made, go_on = worker.Worker.__init__, worker.Worker._go_on
    def note(what):
        with open({str(told)!r}, "a") as file:
            file.write(f"{{what}} {{gc.isenabled()}}\\n")
    def noted_made(*words, **options):
        note("made")
        made(*words, **options)
    def noted_go_on(*words):
        note("mounted")
        go_on(*words)
    worker.Worker.__init__, worker.Worker._go_on = noted_made, noted_go_on
    return link
registry_helper.start = start
code = main.main(sys.argv[1:])
assert gc.isenabled()
sys.exit(code)
"""
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / "cache"), "--no-fill"]
    done = subprocess.run(
        [sys.executable, "-c", code, "image", "mount", *words, image.ref, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert tree_of(directory) == FILES
    assert told.read_text() == "made False\nmounted True\n"
    mounts.umount(str(directory))


def test_a_registrys_client_imports_no_settings_of_starts() -> None:
    """They take a tenth of the time in which a helper comes to ask."""
    code = """
import sys
from bootseer.storage.oci.open import open_repository
open_repository("127.0.0.1:1/a/b:1")[0].close()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "bootseer.storage.oci.registry_repository" in modules
    settings = {"bootseer.config.loading", "bootseer.config.sections", "logging"}
    assert not modules & {*settings, "dataclasses", "inspect"}


def test_a_containers_start_imports_no_standard_dataclasses(tmp_path: Path) -> None:
    """With `inspect` and compiled methods they took a quarter of its imports before the mount."""
    settings = tmp_path / "bootseer.toml"
    settings.write_text('[checkpoint]\nurl = "http://127.0.0.1:1/a"\nto = "/c"\n')
    code = f"""
import sys
from bootseer.config import loading
from bootseer.entrypoint.container import deps_layer, start
from bootseer.entrypoint.parts import all_parts
from bootseer.blockimage.serve import serverless_mount
from bootseer.blocks.cache import sealed_objects
from bootseer.imageprefetch.mount import mount_worker, serverless_choice
from bootseer.imageprefetch.resolve import helped_repository
from bootseer.stripedfs.mount import mount
assert not loading.load_tolerantly({str(settings)!r}).problems
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "bootseer.config.sections" in modules
    assert not modules & {"dataclasses", "inspect", "shutil", "uuid"}


def test_an_agent_has_imported_all_that_a_mount_of_its_own_needs(
    mounts: Mounts, image: Published
) -> None:
    """What the agent lacks, each of its mounts would import again, and a job wait for it."""
    directory, told = mounts.folder / "m", mounts.folder / "modules"
    directory.mkdir()
    code = f"""
import sys
from bootseer.cli import agent
for name in agent.MODULES:
    __import__(name)
before = set(sys.modules)
from bootseer.cli.image import direct as image_direct
from bootseer.imageprefetch.mount import mount_worker as worker
from bootseer.imageprefetch.resolve import registry_helper
hand_over = worker.Worker._hand_over
def noted(self, *about):
    with open({str(told)!r}, "w") as file:
        file.write(" ".join(["noted", *(set(sys.modules) - before)]))
    hand_over(self, *about)
worker.Worker._hand_over = noted
sys.exit(image_direct.run_without_click(sys.argv[1:], in_agent=True))
"""
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / "cache"), "--no-fill"]
    done = subprocess.run(
        [sys.executable, "-c", code, "image", "mount", *words, image.ref, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert tree_of(directory) == FILES
    mounts.umount(str(directory))
    later = set(told.read_text().split()) - {
        "noted",
        "bootseer.imageprefetch.resolve.registry_helper",
    }
    assert not later, later


@pytest.mark.parametrize(
    "module", ["bootseer.cli.agent", "bootseer.imageprefetch.snapshotter.mount_helper"]
)
def test_a_fork_server_has_imported_what_reads_a_token_file(module: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    code = f"""
import sys
from {module} import TASKS
TASKS.load()
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import StoreOptions
options = StoreOptions(token_file={str(token)!r})
client = open_repository("127.0.0.1:1/a/b:1", options)[0]._client
before = set(sys.modules)
assert client._login(client.upstream).registry_token == "t0ken"
print(*(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_mount_reads_on_when_the_package_was_removed(mounts: Mounts, image: Published) -> None:
    """An upgrade replaces our modules; a mount that began before must not look for them."""
    directory, events = mounts.folder / "m", mounts.folder / "events"
    directory.mkdir()
    package = mounts.folder / "site"
    shutil.copytree(Path(bootseer.__file__).parent, package / "bootseer")
    code = f"""
import sys
sys.path.insert(0, {str(package)!r})
from bootseer.__main__ import main
sys.exit(main())
"""
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / "cache"), "--no-fill"]
    done = subprocess.run(
        [sys.executable, "-c", code, "image", "mount", *words, image.ref, str(directory)],
        env={**os.environ, "BOOTSEER_EVENTS": str(events)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    until_s = time.monotonic() + 30
    while not any(b"image.replay" in path.read_bytes() for path in events.glob("*")):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    shutil.rmtree(package)
    assert tree_of(directory) == FILES
    mounts.umount(str(directory))


IGNORING = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from bootseer.imageprefetch.resolve import registry_helper
from bootseer.storage.options import StoreOptions
link = registry_helper.start(
    "127.0.0.1:1/a/b:1", workload="", plain_http=True, options=StoreOptions
)
link.close()
print("started")
"""


def test_a_caller_that_ignores_its_childrens_ends_has_a_helper_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IGNORING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


@pytest.mark.parametrize("goes_on", [True, False])
def test_of_an_image_that_is_known_the_digest_may_be_all(
    image: Published, registry: Any, tmp_path: Path, goes_on: bool
) -> None:
    """FAKE: a gate that shows what is asked for."""
    cache = ImageCache(str(tmp_path))
    with open_repository(image.ref)[0] as plain:
        digest = plain.image("1")[0].digest
    cache.mark_asked(digest, "")
    with Gate(registry.host) as gate:
        link = registry_helper.start(
            image.ref.replace(registry.host, gate.authority),
            workload="",
            plain_http=None,
            options=lambda: DEFAULTS,
            keep_config_in=str(tmp_path),
            digest_first=True,
        )
        with contextlib.closing(link):
            assert helped_repository.peek_digest(link, "2", 30.0) == ""
            assert helped_repository.peek_digest(link, "1", 30.0) == digest
            assert helped_repository._receive(link)[0] == registry_helper.IMAGE  # it is still there
            if goes_on:
                registry_helper.go_on(link)
                while helped_repository._receive(link)[0] != registry_helper.READY:
                    pass
            link.shutdown(SHUT_WR)
            assert link.recv(1) == b""  # it has ended, and with it its requests
        assert bool(gate.asked("/referrers/")) is goes_on
