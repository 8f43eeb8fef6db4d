"""Every command of ours beside the plain way that it replaces: never slower, shown.

    python -m bench plain [CASE ...]

`ours` and `plain` do the same work, from the start of a command to its end, in seconds; before
each the page cache is dropped (as root) and nothing of the other is left. Dependencies are numpy
and pandas with what they need, pinned, from wheels on this disk (`--quick`: a wheel of one file),
`tiny install` is that one file, `uv links` a second start without `--cache` of a `uv pip install`
whose wheels uv has unpacked in its own cache; an image is busybox in a local registry; a
checkpoint is a file of 1 MB on a local web server (`put`: from one local directory to another).
`mount` cases mount, read one file and unmount.

Stores and registries that are `gone` refuse connections, `hanging` ones take a request and never
answer, `slow` ones answer one byte a second; these are fault injection, by a program that does
nothing else. The plain way needs none of them: its image was pulled before, its checkpoint lies
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import harness
from bench.depsnap.benchmark import CACHE, cold, copy, environment, requirements_of, wheelhouse
from bench.depsnap.commands import locked, published
from bench.paced_server import PacedServer
from bootseer.depsnap.restore import staging
from bootseer.depsnap.shared_tree import forms
from tools.images.layout import Image, write_layout
from tools.images.members import directory, file, symlink
from tools.podman import Podman
from tools.registry import Registry

MEASURES = (
    "bootseer",
    "scripts",
    "bench/depsnap/benchmark.py",
    "bench/depsnap/commands.py",
    "bench/depsnap/small-lock.txt",
    "bench/paced_server.py",
    "bench/plain.py",
)
PLAIN = "plain"
FAULTS = ("gone", "slow", "hanging")
DEPS = ("first start", "fresh node", "second start", "nothing to gain", "tiny install", "uv links")
CASES = (
    "run",
    "start nothing to do",
    *(f"deps {situation}" for situation in DEPS),
    *(f"deps store {fault}" for fault in FAULTS),
    "image tiny",
    "image tiny mount",
    "image tiny record",
    "image nothing to gain",
    *(f"image registry {fault}" for fault in FAULTS),
    "checkpoint tiny",
    *(f"checkpoint tiny {way}" for way in ("cat", "mount", "put")),
    *(f"start checkpoint store {fault}" for fault in FAULTS),
)
_PINNED = ("numpy", "pandas", "python-dateutil", "six", "tzdata", "pytz")
_BOOTSEER = str(Path(sys.executable).with_name("bootseer"))
_TRUE = shutil.which("true") or "/bin/true"
_CHECKPOINT_BYTES = 1 << 20

Sides = dict[str, Callable[[], float]]
Keep = Callable[[list[harness.Case]], None]


def timed(command: Sequence[str], environ: dict[str, str] | None = None, cwd: str = "/") -> float:
    """Seconds of one command, which must succeed; what it prints is not kept."""
    out = subprocess.DEVNULL
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=environ, cwd=cwd, stdout=out, stderr=out)
    return time.perf_counter() - begun


# --- servers that do not serve ---------------------------------------------------------------


class BadServer:
    """Fault injection: a port that is `gone`, `slow` (a byte a second) or `hanging`.

    A context manager; `struck` counts the connections that it took (none where it is gone).
    """

    def __init__(self, fault: str, port: int = 0) -> None:
        self.struck = 0
        self._fault = fault
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []

    def __enter__(self) -> BadServer:
        if self._fault == "gone":
            self._listener.close()
        else:
            threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def strike(self, work: Callable[[], float]) -> float:
        """What `work` returns. Raises RuntimeError where it never came to the server: a figure of
        a fault that nobody met would say nothing."""
        before = self.struck
        seconds = work()
        if self._fault != "gone" and self.struck == before:
            raise RuntimeError(f"nobody asked the server that is {self._fault}")
        return seconds

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.struck += 1
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.recv(1 << 16)
            while self._fault == "slow":
                connection.sendall(b"H")
                time.sleep(1)


# --- dependencies ----------------------------------------------------------------------------


def tiny_wheel(folder: Path) -> None:
    """A wheel of one file."""
    folder.mkdir(parents=True)
    about = "bootseer_tiny-1.0.dist-info"
    files = {
        "bootseer_tiny.py": "x = 1\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: bootseer-tiny\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / "bootseer_tiny-1.0-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{about}/RECORD": record}.items():
            archive.writestr(name, text)


class Dependencies:
    """A virtual environment to install into, and wheels of what is installed."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self.folder = folder
        self.venv, self.cache, self.store = folder / "venv", folder / "cache", folder / "store"
        self.wheels = folder / "wheels"
        self.words = ["bootseer-tiny==1.0"]
        if tiny:
            tiny_wheel(self.wheels)
        else:
            self.wheels = wheelhouse(locked("small"))
            pinned = requirements_of("small-lock.txt")
            self.words = [w for w in pinned if w.partition("==")[0].lower() in _PINNED]
        make = [sys.executable, "-m", "venv", "--without-pip", str(self.venv)]
        subprocess.run(make, check=True)
        copy(self.venv, folder / "base")

    def pip(self) -> list[str]:
        python = str(self.venv / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
        return [*pip, "--find-links", str(self.wheels), *self.words]

    def ours(self, store: str = "") -> list[str]:
        places = ["--store", store or str(self.store), "--cache", str(self.cache)]
        return [_BOOTSEER, "deps", "run", *places, "--", *self.pip()]

    def uv(self) -> list[str]:
        uv = [shutil.which("uv") or str(Path(sys.executable).with_name("uv")), "pip", "install"]
        uv += ["-q", "--python", str(self.venv / "bin/python"), "--offline", "--no-index"]
        uv += ["--find-links", str(self.wheels), "--cache-dir", str(self.folder / "uv")]
        return [*uv, *self.words]

    def ours_of_uv(self) -> list[str]:
        """Without a cache that starts share; what is kept of this node lies in its user's."""
        env = ["env", f"XDG_CACHE_HOME={self.cache}"]
        return [*env, _BOOTSEER, "deps", "run", "--store", str(self.store), "--", *self.uv()]

    def reset(self, *, base: str = "base", cache: bool = False, store: bool = False) -> None:
        """The environment as it was, and without a cache and a store unless they are kept."""
        forms.unplace(str(self.venv), str(self.cache / "trees"))
        for path, kept in ((self.venv, False), (self.cache, cache), (self.store, store)):
            if not kept:
                staging.remove_tree(str(path))
        copy(self.folder / base, self.venv)

    def publish(self) -> None:
        """Have a snapshot in the store, and an earlier start's tree in the cache."""
        self.reset()
        timed(self.ours(), environment())
        published(self.store)
        self.reset(store=True)
        timed(self.ours(), environment())

    def measured(self, command: list[str]) -> float:
        cold([self.folder])
        return timed(command, environment())


@contextlib.contextmanager
def dependencies(case: str, folder: Path, quick: bool) -> Iterator[Sides]:
    """`deps SITUATION` and `deps store FAULT`."""
    situation = case.removeprefix("deps ")
    with contextlib.ExitStack() as stack:
        lab = Dependencies(folder, tiny=quick or situation == "tiny install")
        stack.callback(forms.unplace, str(lab.venv), str(lab.cache / "trees"))
        yield _deps_sides(lab, situation, stack)


def _deps_sides(lab: Dependencies, situation: str, stack: contextlib.ExitStack) -> Sides:
    base, kept, url = "base", {}, ""
    theirs = lab.pip()
    bad: BadServer | None = None
    if situation.startswith("store "):
        bad = stack.enter_context(BadServer(situation.removeprefix("store ")))
        url = f"webhdfs://127.0.0.1:{bad.port}/store"
    elif situation in ("fresh node", "second start"):
        lab.publish()
        kept = {"store": True, "cache": situation == "second start"}
    elif situation == "nothing to gain":
        timed(lab.pip(), environment())
        base = "installed"
        copy(lab.venv, lab.folder / base)
    elif situation == "uv links":
        theirs = lab.uv()
        timed(lab.ours_of_uv(), environment())
        published(lab.store)
        kept = {"store": True}

    def ours() -> float:
        lab.reset(base=base, **kept)
        if bad is not None:
            return bad.strike(lambda: lab.measured(lab.ours(url)))
        seconds = lab.measured(lab.ours_of_uv() if situation == "uv links" else lab.ours(url))
        if situation in ("first start", "tiny install"):
            published(lab.store)  # so that it does not slow the next side
        return seconds

    def plain() -> float:
        lab.reset(base=base, cache=True, store=True)
        return lab.measured(theirs)

    return {harness.OURS: ours, PLAIN: plain}


# --- images ----------------------------------------------------------------------------------


@contextlib.contextmanager
def images(case: str, folder: Path, _quick: bool) -> Iterator[Sides]:
    """`image tiny [COMMAND]`, `image nothing to gain`, `image registry FAULT`."""
    busybox = Path("/bin/busybox").read_bytes()
    members = [directory("bin"), file("bin/busybox", busybox, mode=0o755)]
    source = write_layout(folder / "layout", Image([[*members, symlink("bin/true", "busybox")]]))
    with contextlib.ExitStack() as stack:
        registry = Registry(folder / "registry")
        registry.start()
        stack.callback(registry.stop)
        podman = stack.enter_context(Podman(folder / "p", trusted=[registry.host]))
        ref = registry.push(source.source, "tiny")
        places = ["--cache", str(folder / "cache"), "--runtime", str(folder / "run")]
        fault = case.removeprefix("image registry ")
        bad: BadServer | None = None
        if case.startswith("image tiny"):
            timed([_BOOTSEER, "image", "build", "--plain-http", *places[:2], ref])
        elif fault in FAULTS:
            podman.pull(ref)
            registry.stop()
            bad = stack.enter_context(BadServer(fault, int(registry.host.rpartition(":")[2])))

        def reset() -> None:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            if fault not in FAULTS:
                # By its own settings: a store that others made is slow for 20 s at each end.
                podman("rmi", "--all", "--force")
            cold([folder])

        def run(command: list[str]) -> float:
            reset()
            return timed(command, podman.environment)

        told = ["--plain-http", *places, ref]
        ours = [_BOOTSEER, "image", "run", *told, "--", "true"]
        plain = podman.command("run", "--rm", ref, "true")
        if case == "image tiny record":
            ours = [_BOOTSEER, "image", "record", "--plain-http", *places[:2], ref, "--", "true"]
        elif case == "image tiny mount":
            target = str(folder / "mounted")
            os.mkdir(target)
            mount, umount = ([_BOOTSEER, "image", word] for word in ("mount", "umount"))
            ours = _in_turn(
                [*mount, *told, target],
                ["cat", f"{target}/bin/busybox"],
                [*umount, *places[2:], target],
            )
            plain = _in_turn(
                podman.command("pull", "--quiet", ref),
                ["sh", "-c", f'cat "$({shlex.join(podman.command("image", "mount", ref))})"/bin/*'],
                podman.command("image", "umount", ref),
            )

        def asked() -> float:
            return run(ours) if bad is None else bad.strike(lambda: run(ours))

        yield {harness.OURS: asked, PLAIN: lambda: run(plain)}


def _in_turn(*commands: list[str]) -> list[str]:
    """One command that runs all of these, each if the one before it succeeded."""
    return ["sh", "-c", " && ".join(map(shlex.join, commands))]


# --- jobs and checkpoints --------------------------------------------------------------------


@contextlib.contextmanager
def wrappers(case: str, _folder: Path, _quick: bool) -> Iterator[Sides]:
    """`run` and `start nothing to do`: a job that ends at once."""
    word = case.split()[0]

    def ours() -> float:
        cold([])
        return timed([_BOOTSEER, word, "--", _TRUE])

    def plain() -> float:
        cold([])
        return timed([_TRUE])

    yield {harness.OURS: ours, PLAIN: plain}


@contextlib.contextmanager
def checkpoints(case: str, folder: Path, _quick: bool) -> Iterator[Sides]:
    """`checkpoint tiny [WAY]`: a file of a web server, by `stripe get`, `cat` or a mount, and by
    curl; `put`: into a local store by `stripe put`, and by cp."""
    served, mounted = folder / "served", folder / "mounted"
    served.mkdir()
    mounted.mkdir()
    (served / "model").write_bytes(os.urandom(_CHECKPOINT_BYTES))
    with PacedServer(served, bytes_per_s=0, latency_s=0) as server:
        url, source, target = f"{server.url}/model", str(served / "model"), str(folder / "model")
        stripe = [_BOOTSEER, "stripe"]
        ours, plain = {
            "": ([*stripe, "get", url, target], ["curl", "-sf", "-o", target, url]),
            "cat": (
                ["sh", "-c", f"{shlex.join([*stripe, 'cat', url])} > {target}"],
                ["curl", "-sf", "-o", target, url],
            ),
            "mount": (
                _in_turn(
                    [*stripe, "mount", url, str(mounted)],
                    ["cp", str(mounted / "model"), target],
                    [*stripe, "umount", str(mounted)],
                ),
                ["curl", "-sf", "-o", target, url],
            ),
            "put": ([*stripe, "put", source, target], ["cp", source, target]),
        }[case.removeprefix("checkpoint tiny").strip()]

        def measured(command: list[str]) -> float:
            Path(target).unlink(missing_ok=True)
            shutil.rmtree(f"{target}.stripes", ignore_errors=True)
            cold([])
            seconds = timed(command)
            copied = folder / "copied"
            if command is ours and case.endswith("put"):
                timed([*stripe, "get", target, str(copied)])
            else:
                Path(target).rename(copied)
            assert copied.read_bytes() == (served / "model").read_bytes()
            return seconds

        yield {harness.OURS: lambda: measured(ours), PLAIN: lambda: measured(plain)}


@contextlib.contextmanager
def starts(case: str, folder: Path, _quick: bool) -> Iterator[Sides]:
    """`start checkpoint store FAULT`: what the job resumes from has a plain way as well."""
    with BadServer(case.rpartition(" ")[2]) as bad:
        settings = folder / "bootseer.toml"
        url, to = f"http://127.0.0.1:{bad.port}/model", folder / "checkpoint"
        (folder / "model").write_bytes(os.urandom(_CHECKPOINT_BYTES))
        load = ["cp", str(folder / "model"), str(folder / "loaded")]
        settings.write_text(
            f'[checkpoint]\nurl = "{url}"\nto = "{to}"\nload = {json.dumps(load)}\n',
            encoding="utf-8",
        )

        def measured(command: list[str]) -> float:
            (folder / "loaded").unlink(missing_ok=True)
            cold([])
            seconds = timed(command)
            assert (folder / "loaded").stat().st_size == _CHECKPOINT_BYTES
            return seconds

        def ours() -> float:
            command = [_BOOTSEER, "start", "-c", str(settings), "--", _TRUE]
            return bad.strike(lambda: measured(command))

        def plain() -> float:
            return measured(["sh", "-c", f"{shlex.join(load)} && {_TRUE}"])

        yield {harness.OURS: ours, PLAIN: plain}


_LABS = {
    "start checkpoint": starts,
    "deps": dependencies,
    "image": images,
    "checkpoint": checkpoints,
    "run": wrappers,
    "start": wrappers,
}


def run(options: harness.Options) -> list[harness.Case]:
    """All cases; see the top of this file."""
    return measure(options, CASES)


def measure(
    options: harness.Options, wanted: Sequence[str], keep: Keep | None = None
) -> list[harness.Case]:
    """The wanted cases; each is handed to `keep` when it is done."""
    out: list[harness.Case] = []
    CACHE.mkdir(parents=True, exist_ok=True)
    dropped = "page cache dropped before every side"
    conditions = dropped if os.geteuid() == 0 else "page cache as it is"
    for case in (name for name in CASES if name in wanted):
        lab = next(make for prefix, make in _LABS.items() if case.startswith(prefix))
        with (
            tempfile.TemporaryDirectory(prefix="bsp-", dir=CACHE) as name,
            lab(case, Path(name), options.quick) as sides,
        ):
            values = harness.interleave(sides, rounds=options.runs, warmup=0)
        done = harness.cases_of(case, values, unit="s", conditions=conditions)
        out += done
        print(harness.table(done), file=sys.stderr)
        if keep is not None:
            keep(done)
    return out
