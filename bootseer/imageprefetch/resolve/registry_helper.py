"""A process that asks the registry for a mount while the mount's server still imports its modules.

Where no agent stands by, importing takes longer than all that the registry is asked, and the
registry's client alone takes as long to import as a FUSE server does. So the command that mounts
forks this process before it imports anything. It finds the image, its referrers and the manifests
that a mount of it needs, writes them to a link, and waits there to be asked for the stream of one
blob, the hot set's pack, which it passes on byte by byte.

What it says is a proposal: `HelpedRepository` gives it to the mount's server as the repository's
answers, which are checked there as the repository's own are. It tries nothing twice. Where it
fails, is killed or takes long, the server asks the registry by itself, so every fault is reported
by the server, which has the whole patience that the user asked for.

The link is a stream of messages: four bytes of length, then a `marshal`led tuple that begins with
the message's kind. The server writes one line, the digest of a blob; the answer is the message
`stream` and then the bytes of the blob, up to the link's end. The link's end ends this process.
"""

from __future__ import annotations

import marshal
import os
import sys
from _socket import SHUT_RDWR, socket, socketpair  # `socket` itself costs 5 ms

from bootseer.system.fork import fork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Repository
    from bootseer.storage.options import StoreOptions

IMAGE, REFERRERS, MANIFEST, READY, STREAM = "image", "referrers", "manifest", "ready", "stream"
CONFIG = "config"
LONGEST_WAIT_S = 3.0  # for a connection or a byte; whoever needs it longer asks for themselves
LIFE_S = 15.0  # for all but the stream: a registry can drip bytes for hours
CONFIG_S = 10.0  # for the config, once nothing else is asked
TELLING_S = 0.25  # for one that only tells the platform, which no mount is to wait for
PIECE_BYTES = 256 << 10
LENGTH_BYTES = 4
_DIGEST_BYTES = 512


def start(
    ref: str,
    *,
    workload: str,
    plain_http: bool | None,
    options: Callable[[], StoreOptions],
    keep_config_in: str | None = None,
) -> socket:
    """Start a helper for a mount of `ref`; returns the end of the link that its server reads.

    `options` is called there, so that nothing is imported here. With `keep_config_in`, a cache
    folder, the image's config and manifest are kept there as `image run` keeps them. Call it in a
    process that has one thread.
    """
    ours, theirs = socketpair()
    child = fork()
    if child == 0:
        try:
            if fork() == 0:  # a child of nobody's who might wait for all of theirs
                ours.close()
                _become_server(theirs)
                _Helper(theirs, workload, keep_config_in).serve(ref, plain_http, options())
        except BaseException:  # a border: who asked asks the registry, and reports what is wrong
            pass
        finally:
            os._exit(0)
    theirs.close()
    try:
        os.waitpid(child, 0)
    except ChildProcessError:  # who started us has SIGCHLD ignored
        pass
    return ours


def _become_server(link: socket) -> None:
    """Let go of the terminal, and of all that others may wait for us to close."""
    import signal

    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, LIFE_S)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (link.fileno(), null):
            os.dup2(null, descriptor, inheritable=False)


class _Helper:
    """The helper's side of the link."""

    def __init__(self, link: socket, workload: str, keep_config_in: str | None) -> None:
        import threading

        self._link, self._workload, self._keep_config_in = link, workload, keep_config_in
        self._lock = threading.Lock()
        self._is_ready = False

    def serve(self, ref: str, plain_http: bool | None, options: StoreOptions) -> None:
        """Say what is known of the image, then stream the blob that is asked for."""
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
            self._say(
                IMAGE, reference.version, descriptor.as_dict(), manifest.raw, manifest.media_type
            )
            keep = threading.Thread(
                target=self._keep_config, args=(repository, descriptor, manifest), daemon=True
            )
            keep.start()
            self._propose(repository, descriptor)
            tells = self._tells_config(descriptor)
            if tells:
                keep.join(TELLING_S)
            self._say(READY)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            digest = self._asked()
            if digest:
                self._stream(repository, digest)
            if not tells:
                keep.join(CONFIG_S)

    def _tells_config(self, image: Descriptor) -> bool:
        """Whether the server wants the config, which alone tells what no index says."""
        return self._keep_config_in is None and image.platform is None

    def _propose(self, repository: Repository, image: Descriptor) -> None:
        import threading

        listed = repository.referrers(image.digest)
        self._say(REFERRERS, image.digest, [one.as_dict() for one in listed])
        threads = [
            threading.Thread(target=self._manifest, args=(repository, one))
            for one in _likely(listed, self._workload)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _manifest(self, repository: Repository, descriptor: Descriptor) -> None:
        from bootseer.errors import BootseerError

        try:
            found = repository.manifest(descriptor)
            self._say(MANIFEST, descriptor.digest, found.raw, found.media_type)
        except (BootseerError, OSError):
            pass  # the server asks for it by itself

    def _keep_config(
        self, repository: Repository, descriptor: Descriptor, manifest: Manifest
    ) -> None:
        tells = self._tells_config(descriptor)
        if self._keep_config_in is None and not tells:
            return
        from bootseer.errors import BootseerError
        from bootseer.imageprefetch.image_cache import LocalStore
        from bootseer.imageprefetch.run.image_config import LIMIT_BYTES, fetch_and_keep

        try:
            if tells:
                raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
                self._say(CONFIG, manifest.config.digest, raw)
            elif self._keep_config_in is not None:
                fetch_and_keep(repository, descriptor, manifest, LocalStore(self._keep_config_in))
        except (BootseerError, OSError):
            pass  # who needs it fetches it

    def _say(self, *message: Any) -> None:
        body = marshal.dumps(message)
        with self._lock:
            if self._is_ready and message[0] == CONFIG:
                return  # too late: what comes now is the stream's
            self._is_ready = self._is_ready or message[0] == READY
            self._link.sendall(len(body).to_bytes(LENGTH_BYTES, sys.byteorder) + body)

    def _asked(self) -> str:
        """The digest of the blob that is to be streamed; "" where none is."""
        line = b""
        while not line.endswith(b"\n"):
            more = self._link.recv(_DIGEST_BYTES)
            if not more:
                return ""
            line += more
        return line.decode().strip()

    def _stream(self, repository: Repository, digest: str) -> None:
        view = memoryview(bytearray(PIECE_BYTES))
        with repository.stream(digest, verify=False) as stream:
            size_bytes = stream.size_bytes
            if size_bytes < 0:
                return
            self._say(STREAM, digest, size_bytes)
            while count := stream.readinto(view):
                self._link.sendall(view[:count])


def _likely(listed: Iterable[Descriptor], workload: str) -> Iterator[Descriptor]:
    """The manifests that a mount will ask for: the block image's, and a hot set's."""
    from bootseer.blockimage import media_types

    listed = list(listed)
    blocks = [one for one in listed if one.artifact_type == media_types.BLOCK_IMAGE]
    yield from blocks[:1]
    for name in dict.fromkeys((workload, "")):
        hot = [
            one
            for one in listed
            if one.artifact_type == media_types.HOT_SET
            and one.annotations.get(media_types.WORKLOAD_NOTE) == name
        ]
        if hot:
            yield max(hot, key=lambda one: one.annotations.get(media_types.CREATED_NOTE, ""))
            return


def shut(link: socket) -> None:
    """End the helper behind a link, whoever else has the link open; twice is safe."""
    try:
        link.shutdown(SHUT_RDWR)
    except OSError:
        pass  # it ended by itself


def end(link: socket) -> None:
    """The same, and close the link."""
    shut(link)
    link.close()
