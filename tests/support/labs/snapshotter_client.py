"""A client of a snapshotter's socket, and images that are plain directories.

`Client` speaks containerd's snapshots API with the messages of `snapshotter.messages`; what goes
wrong is a `RefusedError` with the gRPC status's name. `DirectoryMounter` is an ImageMounter whose
images are directories of this machine, bound; each can be made to fail.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bootseer.errors import AccessDeniedError, NotFoundError, StoreUnavailableError
from bootseer.events.writer import NullWriter
from bootseer.fuse.mount import mount_point
from bootseer.imageprefetch.snapshotter import messages, process
from bootseer.imageprefetch.snapshotter.image_mounts import ImageMounter
from bootseer.imageprefetch.snapshotter.types import TARGET_LABEL, StockImage


class RefusedError(Exception):
    """A call's fault: `code` is NOT_FOUND, ALREADY_EXISTS, …"""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Client:
    def __init__(self, socket_path: Path | str, about: Sequence[tuple[str, str]] = ()) -> None:
        """`about` is sent with each call: what containerd itself wants to know of a client."""
        import grpc

        self._about = about

        self._grpc = grpc
        self._types = messages.messages()
        self._channel = grpc.insecure_channel(f"unix:{socket_path}")

    def close(self) -> None:
        self._channel.close()

    def _call(self, name: str, /, **fields: Any) -> Any:
        request, response, streams = messages.CALLS[name]
        make = self._channel.unary_stream if streams else self._channel.unary_unary
        call = make(
            f"/{messages.SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(self._types, response).FromString,
        )
        message = getattr(self._types, request)(snapshotter="bootseer", **fields)
        try:
            answer = call(message, timeout=60, wait_for_ready=True, metadata=self._about)
            return list(answer) if streams else answer
        except self._grpc.RpcError as error:
            raise RefusedError(error.code().name, error.details()) from error

    def prepare(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> Any:
        return list(self._call("Prepare", key=key, parent=parent, labels=labels or {}).mounts)

    def view(self, key: str, parent: str = "") -> Any:
        return list(self._call("View", key=key, parent=parent).mounts)

    def mounts(self, key: str) -> Any:
        return list(self._call("Mounts", key=key).mounts)

    def commit(self, name: str, key: str, labels: Mapping[str, str] | None = None) -> None:
        self._call("Commit", name=name, key=key, labels=labels or {})

    def remove(self, key: str) -> None:
        self._call("Remove", key=key)

    def stat(self, key: str) -> Any:
        return self._call("Stat", key=key).info

    def update(self, name: str, labels: Mapping[str, str], *paths: str) -> Any:
        info = self._types.Info(name=name, labels=labels)
        return self._call("Update", info=info, update_mask={"paths": paths}).info

    def list(self, *filters: str) -> Any:
        return [info for part in self._call("List", filters=filters) for info in part.info]

    def names(self, *filters: str) -> list[str]:
        return [info.name for info in self.list(*filters)]

    def usage(self, key: str) -> tuple[int, int]:
        answer = self._call("Usage", key=key)
        return answer.size, answer.inodes

    def cleanup(self) -> None:
        self._call("Cleanup")

    def layer(self, name: str, parent: str, files: Mapping[str, str], work: Path) -> None:
        """Commit a layer with these files, as an unpacking client does."""
        key = f"extract {name}"
        with mounted(self.prepare(key, parent), work) as tree:
            for path, text in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_text(text)
        self.commit(name, key)


@contextmanager
def mounted(mounts: Sequence[Any], work: Path) -> Iterator[Path]:
    """What a runtime sees of a snapshot."""
    (mount,) = mounts
    target = work / "seen"
    target.mkdir()
    options = ",".join(mount.options)
    kind = ["--rbind"] if mount.type == "bind" else ["-t", mount.type]
    subprocess.run(["mount", *kind, "-o", options, mount.source, str(target)], check=True)
    try:
        if "ro" in mount.options:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
        target.rmdir()


def remote_labels(target: str, image: StockImage, depth: int) -> dict[str, str]:
    """What containerd's CRI plugin says of a layer."""
    prefix = "containerd.io/snapshot/cri."
    return {
        TARGET_LABEL: target,
        prefix + "image-ref": image.reference,
        prefix + "manifest-digest": image.digest,
        prefix + "layer-digest": image.layers[depth],
    }


class DirectoryMounter:
    """An ImageMounter over directories: `add` makes an image of one directory a layer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, StockImage] = {}
        self.gone = False  # fault: the registry and all block images are away
        self.broken = False  # fault: block images are found but cannot be mounted
        self.forbidden = ""  # names that begin so are not allowed
        self.calls: list[str] = []
        self.hold = threading.Event()  # cleared, `find` waits
        self.hold.set()
        self.hold_mounts = threading.Event()  # cleared, `mount` waits
        self.hold_mounts.set()

    def add(self, name: str, layers: Sequence[Mapping[str, str]]) -> StockImage:
        digests = tuple(f"{name}-{depth}" for depth in range(len(layers)))
        image = StockImage(f"sha256:{name}", f"reg/{name}:1", digests)
        for depth in range(len(layers)):
            for files in layers[: depth + 1]:
                for path, text in files.items():
                    target = self._tree(image, depth + 1) / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text)
        self._images[image.reference] = image
        return image

    def _tree(self, image: StockImage, layers: int) -> Path:
        return self._folder / f"{image.digest}-{layers}"

    def check(self, reference: str) -> None:
        if reference.startswith(self.forbidden or "\0"):
            raise AccessDeniedError(f"{reference} must not be lazy")

    def find(self, reference: str, digest: str) -> StockImage:
        self.calls.append(f"find {reference}")
        self.hold.wait()
        if self.gone:
            raise StoreUnavailableError("the registry is away")
        found = self._images.get(reference)
        if found is None or digest not in ("", found.digest):
            raise NotFoundError(f"no block image of {reference}; run `bootseer image build` first")
        return found

    def mount(self, image: StockImage, directory: str) -> None:
        self.calls.append(f"mount {image.reference}")
        self.hold_mounts.wait()
        if self.gone or self.broken:
            raise StoreUnavailableError("the block image cannot be mounted")
        tree = str(self._tree(image, len(image.layers)))
        subprocess.run(["mount", "--bind", tree, directory], check=True)

    def umount(self, directory: str) -> None:
        while self.answers(directory):
            subprocess.run(["umount", "-l", directory], check=True)

    def answers(self, directory: str) -> bool:
        return mount_point.find_mount(directory) is not None

    def unpack(self, image: StockImage, layers: int, directory: str) -> None:
        self.calls.append(f"unpack {image.reference} {layers}")
        if self.gone:
            raise StoreUnavailableError("the registry is away")
        shutil.copytree(self._tree(image, layers), directory, dirs_exist_ok=True)


class Running:
    """A snapshotter in this process below a folder; `said` are its log lines."""

    def __init__(self, folder: Path, mounter: ImageMounter, writer: NullWriter) -> None:
        self.settings = process.SnapshotterSettings(str(folder / "root"), str(folder / "snap.sock"))
        self.root = folder / "root"
        self.said: list[str] = []
        self._serving = process.running_snapshotter(
            self.settings, mounter, self.said.append, writer
        )
        self._serving.__enter__()
        self.client = Client(self.settings.address)

    def wait_restored(self) -> None:
        """Until what is done in the background at a start is done."""
        for thread in threading.enumerate():
            if thread.name.startswith("restore"):
                thread.join()

    def close(self) -> None:
        self.client.close()
        self._serving.__exit__(None, None, None)
