"""Kill saves of distributed checkpoints over earlier ones; run as a program by the crash tests.

`ranks ROOT MOUNT`: torch's own save by two gloo ranks through a mount, killed with kill -9 before
and after each of its calls that change a file (fault injection: the calls are wrapped). After each
kill torch must load the old checkpoint or the new one, whole, through the mount and through
fsspec. `server ROOT`: what a mount does with such a save, killed at each call that changes the
store. Prints one JSON line. A process of its own, since forks and threads do not mix.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import DCP_METADATA
from bootseer.stripedfs.read.open import open_file
from bootseer.stripedfs.write.dcp_files import METADATA_DRAFT, StagedFile
from bootseer.stripedfs.write.saved_file import SavedFile
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.programs.put_killer import Killing, Steps

KEYS = ("rank0", "rank1")
LENGTH = 20_000
NEVER = 10**6


def forked(work: Callable[[], None], *, group: int = -1) -> int:
    """The child's id; it ends when the work does."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if group >= 0:
            os.setpgid(0, group)
        work()
        code = 0
    except BaseException as error:  # the parent sees the code alone
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


class Kills:
    """Ends the whole process group at the `at`th step of one rank."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.steps = 0

    def __call__(self) -> None:
        self.steps += 1
        self.left -= 1
        if self.left == -1:
            os.killpg(0, signal.SIGKILL)


def wrap(kills: Kills) -> None:
    """Steps around what torch's file system does to files."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    stream, rename, remove = FileSystem.create_stream, FileSystem.rename, FileSystem.rm_file

    @contextlib.contextmanager
    def stepped(self: Any, path: Any, mode: str) -> Iterator[Any]:
        kills()
        with stream(self, path, mode) as file:
            kills()
            yield file
            if not file.closed:
                file.flush()
            kills()
        kills()

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            kills()
            result = call(*args)
            kills()
            return result

        return both

    FileSystem.create_stream = stepped
    FileSystem.rename, FileSystem.rm_file = around(rename), around(remove)


def rank_saves(rank: int, listener: socket.socket, where: str, step: int, at: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    kills = Kills(at)
    wrap(kills)
    # It listens already: a rank that found nobody there would try again half a second later.
    port, fd = listener.getsockname()[1], listener.detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, master_listen_fd=fd)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dcp.save({KEYS[rank]: torch.full((LENGTH,), float(step))}, checkpoint_id=where)
    assert at >= kills.steps
    dist.destroy_process_group()


def save(where: str, step: int, *, rank: int = 0, at: int = NEVER) -> list[int]:
    """Both ranks' exit statuses; `rank` ends both at its `at`th step."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [at if number == rank else NEVER for number in (0, 1)]
        first = forked(lambda: rank_saves(0, listener, where, step, ends[0]), group=0)
        with contextlib.suppress(OSError):  # it may have done so itself
            os.setpgid(first, first)
        second = forked(lambda: rank_saves(1, listener, where, step, ends[1]), group=first)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)]


def loaded_step(where: str) -> int:
    """Which save is there, as torch loads it in a process of its own; 0 = a mixture or none."""
    reading, writing = os.pipe()

    def load() -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        state = {key: torch.zeros(LENGTH) for key in KEYS}
        dcp.load(state, checkpoint_id=where, no_dist=True)
        values = {float(v) for tensor in state.values() for v in tensor.unique()}
        os.write(writing, b"%d" % (int(values.pop()) if len(values) == 1 else 0))

    child = forked(load)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return int(said or b"0")


def ranks(root: str, mount: str) -> Counter[str]:
    import torch
    import torch.distributed.checkpoint  # noqa: F401 - before any fork

    import bootseer.stripedfs.fsspec_face.filesystem  # noqa: F401

    warnings.simplefilter("ignore")
    where, by_name = f"{mount}/run", f"striped::file://{root}/run"
    found: Counter[str] = Counter()
    step = 1
    assert save(where, step) == [0, 0]
    for rank in (0, 1):
        at = 0
        while True:
            before, step = loaded_step(where), step + 1
            codes = save(where, step, rank=rank, at=at)
            if codes == [0, 0]:  # there is no such step
                break
            assert codes == [-signal.SIGKILL] * 2, (rank, at, codes)
            found["kills"] += 1
            seen = {loaded_step(where), loaded_step(by_name)}
            assert len(seen) == 1, (rank, at, seen)
            (now,) = seen
            assert now in (before, step), (rank, at, before, step, now)
            found["new" if now == step else "old"] += 1
            at += 1
        assert loaded_step(where) == loaded_step(by_name) == step
        found["whole"] += 1
    return found


SETTINGS = WriteSettings(chunk_bytes=4096, width=2)
SHARDS = ("__0_0.distcp", "__1_0.distcp")


def content(name: str, step: int) -> bytes:
    if name == DCP_METADATA:
        return b"%d %s" % (step, " ".join(SHARDS).encode())
    return name.encode() * (3000 if name == SHARDS[0] else 3) + b"%d" % step


def save_first(root: str) -> None:
    """File by file, as into a folder without one."""
    store = LocalStore(root)
    for name in (*SHARDS, DCP_METADATA):
        with SavedFile(store, f"run/{name}", SETTINGS) as file:
            file.write(content(name, 1))


def save_in(store: LocalStore, step: int) -> None:
    """What a mount does when both ranks' files are closed and `.metadata` is renamed."""
    bases = (*SHARDS, METADATA_DRAFT)
    staged = {base: StagedFile.begin(store, "run", base, SETTINGS) for base in bases}
    for base, file in staged.items():
        file.write(content(DCP_METADATA if base == METADATA_DRAFT else base, step))
        file.close()
    assert staged[METADATA_DRAFT].take_named() == []
    staged[METADATA_DRAFT].publish()
    for file in staged.values():
        file.abort()


def check(root: str, step: int) -> None:
    """Fails unless all that is there, by each name and in the listing, is of one save."""
    store = LocalStore(root)
    with Fetcher() as fetcher:
        for name in (DCP_METADATA, *SHARDS):
            source = open_file(store, namespace.look_up(store, f"run/{name}"))
            data = bytearray(source.size_bytes)
            fetcher.read_into(source, 0, memoryview(data))
            assert data == content(name, step), (name, step)
    listed = namespace.list_folder(store, namespace.look_up(store, "run"))
    assert [each.name for each in listed] == [f"run/{name}" for name in (DCP_METADATA, *SHARDS)]


def holds(root: str, step: int) -> bool:
    def quietly() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # one of two such looks fails, as it must
        check(root, step)

    return os.waitpid(forked(quietly), 0)[1] == 0


def server(root: str) -> Counter[str]:
    found: Counter[str] = Counter()
    assert os.waitpid(forked(lambda: save_first(root)), 0)[1] == 0
    step, at = 1, 0
    while True:
        killing, new_step = Killing(root, Steps(at)), step + 1
        child = forked(functools.partial(save_in, killing, new_step))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == -signal.SIGKILL, (at, code)
        found["kills"] += 1
        old, new = holds(root, step), holds(root, new_step)
        assert old != new, (at, old, new)
        found["new" if new else "old"] += 1
        step += new
        at += 1
    assert holds(root, step + 1)
    return found


if __name__ == "__main__":
    done = ranks(*sys.argv[2:]) if sys.argv[1] == "ranks" else server(sys.argv[2])
    print(json.dumps(done))
