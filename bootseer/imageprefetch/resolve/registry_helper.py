"""A process that asks the registry for a mount while the mount's server still imports its modules.

Without an agent, importing takes longer than all requests to the registry, and the registry's
client alone takes as long to import as a FUSE server. So the command that mounts forks this
process before it imports anything. It finds the image, its referrers and the manifests that a
mount of it needs, writes them to a link, and then waits for a request for the stream of one blob,
the hot set's pack, which it forwards.

Its answers are proposals: `HelpedRepository` gives them to the mount's server, which checks them
as it checks the repository's own. The helper tries nothing twice. Where it fails, is killed or
takes long, the server asks the registry itself, with all the time limits that the user set, so
that the server reports every fault.

The link is a stream of messages: four bytes of length, then a `marshal`led tuple that begins with
the message's kind. The server writes one line, the digest of a blob; the answer is the message
`stream` and then the bytes of the blob, up to the link's end. The link's end ends this process.
"""

from __future__ import annotations

import marshal
import os
import sys
from _socket import SHUT_RDWR, socket, socketpair  # `socket` itself costs 5 ms

from bootseer.system.child_processes import fork, silence_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Repository
    from bootseer.storage.options import StoreOptions

IMAGE, REFERRERS, MANIFEST, READY, STREAM = "image", "referrers", "manifest", "ready", "stream"
CONFIG = "config"
LONGEST_WAIT_S = 3.0  # for a connection or a byte; the server waits longer itself if it must
LIFE_S = 15.0  # without the stream: a registry can drip bytes for hours
CONFIG_S = 10.0  # for the config, once nothing else is needed
PLATFORM_S = 0.25  # for a config that only names the platform, for which no mount waits
PIECE_BYTES = 256 << 10
LENGTH_BYTES = 4
_DIGEST_BYTES = 512
_GO_ON = b"\n"


def start(
    ref: str,
    *,
    workload: str,
    plain_http: bool | None,
    options: Callable[[], StoreOptions],
    keep_config_in: str | None = None,
    digest_first: bool = False,
) -> socket:
    """Start a helper for a mount of `ref`; returns the end of the link that the server reads.

    `options` is called in the helper, so that nothing is imported here. With `keep_config_in`, a
    cache directory, the image's config and manifest are kept there as `image run` keeps them. With
    `digest_first` as well, the helper of an image that this cache knows goes on only once `go_on`
    is called: its digest may be all that is needed. Call it in a process that has one thread.
    """
    ours, theirs = socketpair()
    child = fork()
    if child == 0:
        try:
            if fork() == 0:  # a grandchild: the caller may wait for all of its children
                ours.close()
                _detach(theirs)
                helper = _Helper(theirs, workload, keep_config_in, digest_first=digest_first)
                helper.serve(ref, plain_http, options())
        except BaseException:  # a border: the server asks the registry, and reports what is wrong
            pass
        finally:
            os._exit(0)
    theirs.close()
    try:
        os.waitpid(child, 0)
    except ChildProcessError:  # our own parent had SIGCHLD ignored
        pass
    return ours


def _detach(link: socket) -> None:
    """Leave the terminal, and close every descriptor that others may wait for us to close."""
    import signal

    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, LIFE_S)
    silence_descriptors({link.fileno()})


class _Helper:
    """The helper's side of the link."""

    def __init__(
        self, link: socket, workload: str, keep_config_in: str | None, *, digest_first: bool
    ) -> None:
        import threading

        self._link, self._workload, self._keep_config_in = link, workload, keep_config_in
        self._digest_first = digest_first
        self._lock = threading.Lock()
        self._is_ready = False

    def serve(self, ref: str, plain_http: bool | None, options: StoreOptions) -> None:
        """Send what is known of the image, then stream the requested blob."""
        import signal
        import threading

        from bootseer import light_dataclasses as dataclasses
        from bootseer.storage.oci.open import open_repository

        options = dataclasses.replace(
            options,
            connect_s=min(options.connect_s, LONGEST_WAIT_S),
            stall_s=min(options.stall_s, LONGEST_WAIT_S),
            retry_s=0.0,
        )
        repository, reference = open_repository(ref, options, plain_http=plain_http)
        with repository:
            descriptor, manifest = repository.image(reference.version)
            self._send(
                IMAGE, reference.version, descriptor.as_dict(), manifest.raw, manifest.media_type
            )
            if self._is_enough(descriptor):
                return
            keep = threading.Thread(
                target=self._keep_config, args=(repository, descriptor, manifest), daemon=True
            )
            keep.start()
            self._propose(repository, descriptor)
            sends_config = self._sends_config(descriptor)
            if sends_config:
                keep.join(PLATFORM_S)
            self._send(READY)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            digest = self._await_request()
            if digest:
                self._stream(repository, digest)
            if not sends_config:
                keep.join(CONFIG_S)

    def _is_enough(self, image: Descriptor) -> bool:
        """Whether the link ends as nothing more is needed; waits to be told to go on."""
        if not self._digest_first or self._keep_config_in is None:
            return False
        from bootseer.imageprefetch.image_cache import ImageCache

        if not ImageCache(self._keep_config_in).is_fresh(image.digest, self._workload):
            return False
        return self._link.recv(len(_GO_ON)) != _GO_ON

    def _sends_config(self, image: Descriptor) -> bool:
        """Whether the server needs the config, because no index names the platform."""
        return self._keep_config_in is None and image.platform is None

    def _propose(self, repository: Repository, image: Descriptor) -> None:
        import threading

        referrers = repository.referrers(image.digest)
        self._send(REFERRERS, image.digest, [one.as_dict() for one in referrers])
        threads = [
            threading.Thread(target=self._send_manifest, args=(repository, one))
            for one in _likely_manifests(referrers, self._workload)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send_manifest(self, repository: Repository, descriptor: Descriptor) -> None:
        from bootseer.errors import BootseerError

        try:
            manifest = repository.manifest(descriptor)
            self._send(MANIFEST, descriptor.digest, manifest.raw, manifest.media_type)
        except (BootseerError, OSError):
            pass  # the server asks for it itself

    def _keep_config(
        self, repository: Repository, descriptor: Descriptor, manifest: Manifest
    ) -> None:
        sends_config = self._sends_config(descriptor)
        if self._keep_config_in is None and not sends_config:
            return
        from bootseer.errors import BootseerError
        from bootseer.imageprefetch.image_cache import ImageCache
        from bootseer.storage.oci.config import LIMIT_BYTES

        try:
            if sends_config:
                raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
                self._send(CONFIG, manifest.config.digest, raw)
            elif self._keep_config_in is not None:
                cache = ImageCache(self._keep_config_in)
                if cache.config(descriptor.digest) is None:
                    cache.fetch_config(repository, descriptor, manifest)
        except (BootseerError, OSError):
            pass  # it is fetched again where it is needed

    def _send(self, *message: Any) -> None:
        body = marshal.dumps(message)
        with self._lock:
            if self._is_ready and message[0] == CONFIG:
                return  # too late: what comes now is the stream's
            self._is_ready = self._is_ready or message[0] == READY
            self._link.sendall(len(body).to_bytes(LENGTH_BYTES, sys.byteorder) + body)

    def _await_request(self) -> str:
        """The digest of the blob to be streamed; "" for none."""
        line = b""
        while not line.strip() or not line.endswith(b"\n"):
            received = self._link.recv(_DIGEST_BYTES)
            if not received:
                return ""
            line += received
        return line.decode().strip()

    def _stream(self, repository: Repository, digest: str) -> None:
        view = memoryview(bytearray(PIECE_BYTES))
        with repository.stream(digest, verify=False) as stream:
            size_bytes = stream.size_bytes
            if size_bytes < 0:
                return
            self._send(STREAM, digest, size_bytes)
            while count := stream.readinto(view):
                self._link.sendall(view[:count])


def _likely_manifests(referrers: Iterable[Descriptor], workload: str) -> Iterator[Descriptor]:
    """The manifests that a mount will ask for: the block image's, and a hot set's."""
    from bootseer.storage.oci import media_types

    referrers = list(referrers)
    block_images = [one for one in referrers if one.artifact_type == media_types.BLOCK_IMAGE]
    yield from block_images[:1]
    for name in dict.fromkeys((workload, "")):
        hot_sets = [
            one
            for one in referrers
            if one.artifact_type == media_types.HOT_SET
            and one.annotations.get(media_types.WORKLOAD_NOTE) == name
        ]
        if hot_sets:
            yield max(hot_sets, key=lambda one: one.annotations.get(media_types.CREATED_NOTE, ""))
            return


def go_on(link: socket) -> None:
    """Tell a helper with `digest_first` that more than the digest is needed."""
    try:
        link.sendall(_GO_ON)
    except OSError:
        pass  # it has ended


def shut(link: socket) -> None:
    """End the helper behind a link, though others have the link open; twice is safe."""
    try:
        link.shutdown(SHUT_RDWR)
    except OSError:
        pass  # it ended by itself


def end(link: socket) -> None:
    """End the helper behind a link, and close the link."""
    shut(link)
    link.close()
