"""The process that serves a mounted image: brings it up, or takes over from one that died."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import erofs_mount
from bootseer.blockimage.serve.data_file import ImageFront
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.fuse.serve.daemon import Tell, packed, write_waiting
from bootseer.imageprefetch.image_cache import LocalStore
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.mount_events import MOUNT, FaultLog, Story
from bootseer.imageprefetch.mount.readahead_notices import Announced
from bootseer.imageprefetch.record.server_recording import Noting
from bootseer.imageprefetch.resolve.resolver import Opened, Resolver
from bootseer.imageprefetch.run import container_folders
from bootseer.storage import retry

if TYPE_CHECKING:
    from _socket import socket

    from bootseer.blockimage.erofs_mount import Erofs
    from bootseer.blockimage.serve.image_server import ImageServer, ServeSettings
    from bootseer.blockimage.serve.opened_image import BlockImage
    from bootseer.blockimage.serve.serverless_mount import CompleteImage
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.mount.mount import MountSettings


ASKED_S = 5.0
"""So long reads of a container that was asked to end may wait while nothing comes for them."""


class Worker:
    """One life of a server. `front` is what the FUSE mount serves, from the first moment on."""

    def __init__(
        self,
        settings: MountSettings,
        state: server_registry.State,
        tell: Tell,
        say: Callable[[str], None],
        faults: FaultLog,
        helper: socket | None = None,
    ) -> None:
        self._settings, self._state, self._tell, self._say = settings, state, tell, say
        self._helper = helper
        self._story = Story(
            settings.ref, settings.workload, say, faults, again_s=settings.deadline_s
        )
        self._server: ImageServer | None = None
        self._complete: CompleteImage | None = None  # instead of a server
        self._opened: Opened | None = None
        self._ended = threading.Event()
        self.front = Front(self, released=_end, failed=self._read_failed)
        self.front.announced = Announced(state.folder).covers
        before = state.server
        self._noting = Noting(
            settings,
            os.path.join(state.folder, server_registry.TOUCHES),
            self.front,
            self._data_key,
        )
        if before is not None and not before.sealed:  # readers wait for our answers already
            self.front.size(before.data_bytes)
            self.front.adopt(before.handle)
            self._noting.resume(before.data_bytes)
        body = self._bring_up if before is None else lambda: self._take_over(before)
        threading.Thread(target=self._guarded, args=(body,), name="image-up", daemon=True).start()

    # --- coming up -----------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # a border: the caller hears why, and this server ends
            self._noting.drop()
            self._story.not_mounted(error)
            self._answer(packed(error))
            self._story.fault("mount", str(error))
            _end()

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            self._tell(answer)
        except OSError:
            pass  # nobody waits any more

    def _hand_over(self, about: dict[str, Any], server: server_registry.Server) -> None:
        """The mount is the caller's from here on; raises where nobody waits any more."""
        try:
            self._tell({"mounted": about, "server": _plain(server)})
        except OSError as error:
            raise StoreUnavailableError("not mounted, as who asked for it has ended") from error

    def _resolver(self) -> Resolver:
        settings = self._settings
        return Resolver(
            settings.ref,
            LocalStore(settings.cache),
            workload=settings.workload,
            options=settings.options,
            plain_http=settings.plain_http,
            look_s=settings.look_s,
            look_begun_s=settings.look_begun_s,
            scratch=self._state.folder,
            note=self._story.note,
            helper=self._helper,
            platform_known=settings.platform_known,
        )

    def _bring_up(self) -> None:
        self._story.begin(MOUNT)
        resolver = self._resolver()
        retry.wait_listener = lambda *told: write_waiting(self._tell, *told)
        try:
            self._mount_resolved(resolver)
        finally:
            retry.wait_listener = None
            resolver.dismiss_helper()

    def _mount_resolved(self, resolver: Resolver) -> None:
        settings, state = self._settings, self._state
        digest = resolver.digest()
        with server_registry.bringing_up(settings.runtime, digest):
            other = self._other(digest) if settings.share else None
            if other is not None:
                self._share(digest, other)
                return
            opened = self._opened = resolver.open(digest)
            resolver.dismiss_helper()
            os.symlink(opened.image.meta_path, state.meta)
            image = dataclasses.replace(opened.image, meta_path=state.meta)
            mounted = self._mount(digest, dataclasses.replace(opened, image=image))
            if settings.nosuid:
                erofs_mount.restrict(settings.directory, nosuid=True)
            complete = self._complete is not None
            told = server_registry.Server(
                digest=digest,
                block_image=opened.block_image,
                workload=settings.workload,
                device=mounted.device,
                source=mounted.source,
                handle=self.front.last_handle,
                data_bytes=opened.image.data_bytes,
                loop=mounted.loop,
                shared=settings.share,
                state=state.folder,
                supervisor=os.getppid(),
                sealed=complete,
                bdis=mounted.bdis,
            )
            state.tell(told)
            if not complete:
                self._noting.begin(opened.image.data_bytes)  # before anybody can read
            try:
                self._hand_over(self._about(digest, told, opened), told)
            except BaseException:  # before anybody else can share it
                server_registry.unmount_all(told)
                raise
        _collect_garbage()
        hot = bool(opened.hot_set) and settings.hot
        self._story.mounted(opened, hot=hot, loop=told.loop, complete=complete)
        self._go_on(settings.directory, digest, opened)

    def _mount(self, digest: str, opened: Opened) -> Erofs:
        """Mount over what is here, where it is all of the image, else over our own front."""
        from bootseer.imageprefetch.mount import serverless_choice

        directory = self._settings.directory
        made = serverless_choice.complete_of(self._settings, digest, opened, self._story.fault)
        if made is not None:
            try:
                mounted = made.mount(directory)
            except BootseerError as error:  # the usual way says what is really wrong, if anything
                made.give_up()
                self._story.fault("complete", f"it is served, though all of it is here: {error}")
            else:
                self._complete = made
                return mounted
        return self._make_server(opened).mount(self._state.front, directory)

    def _other(self, digest: str) -> server_registry.Server | None:
        """A server of this image that is mounted somewhere that a path leads to."""
        for server in server_registry.servers(self._settings.runtime):
            if server.digest != digest or not server.shared:
                continue
            if server_registry.whole_at(server):
                return server
        return None

    def _share(self, digest: str, other: server_registry.Server) -> None:
        """Another server has it, which has replayed its own workload alone."""
        _collect_garbage()
        self._story.shared()
        self._hand_over(self._about(digest, other), other)
        if not self._settings.hot or self._settings.workload == other.workload:
            _end()
            return
        # In a thread of its own, as whoever calls us holds the image's lock.
        replay = threading.Thread(target=lambda: self._replay(other), name="image-beside")
        replay.daemon = True
        replay.start()

    def _replay(self, other: server_registry.Server) -> None:
        """Read this mount's hot set ahead through the other server, as long as it is mounted."""
        from bootseer.imageprefetch.hotset.replay import replay_while_mounted

        try:
            replayed = replay_while_mounted(self._settings, other)
            if replayed is not None:
                self._story.warmed(replayed)
        except Exception as error:  # a border: the tree is there, and is read without it
            self._story.fault("replay", f"the hot set was not replayed: {error}")
        finally:
            _end()

    def _take_over(self, before: server_registry.Server) -> None:
        """Readers wait meanwhile; EROFS is mounted already."""
        _collect_garbage()
        if before.sealed:  # nobody waits for anything
            self._watch_mounts()
            return
        opened = self._opened = self._reopened(before)
        if opened is None:  # unmounted meanwhile
            self._noting.drop()
            return
        server = self._make_server(opened)
        server.adopt(before.loop, before.bdis)
        mounts = server_registry.whole_at(before)
        if not mounts:
            server.settings = dataclasses.replace(server.settings, warm=False)
        self._go_on(mounts[0] if mounts else "", before.digest, opened)

    def _reopened(self, before: server_registry.Server) -> Opened | None:
        from bootseer.imageprefetch.mount.takeover import reopened

        return reopened(
            self._resolver(),
            before.digest,
            before.block_image,
            front=self.front,
            deadline_s=self._settings.deadline_s,
            ended=self._ended,
            say=self._story.fault,
        )

    def _make_server(self, opened: Opened) -> ImageServer:
        from bootseer.blockimage.serve.image_server import ImageServer

        image = opened.image if self._settings.hot else _without_hot(opened)
        server = ImageServer(
            image,
            self.front,
            self._serve_settings(opened.digest),
            say=self._story.fault,
            hot_done=self._hot_done,
        )
        self._server = server
        return server

    def _serve_settings(self, digest: str) -> ServeSettings:
        from bootseer.blockimage.serve.fill_settings import FillSettings
        from bootseer.blockimage.serve.image_server import ServeSettings
        from bootseer.blocks.settings import DEFAULTS as FETCH

        settings = self._settings
        lock = LocalStore(settings.cache).fill_lock(digest)
        fill = FillSettings(rate_bytes_s=settings.fill_rate_bytes_s, lock=lock)
        fetch = dataclasses.replace(
            FETCH,
            memory_bytes=settings.memory_bytes,
            demand_deadline_s=settings.deadline_s,
            stall_s=min(FETCH.stall_s, settings.deadline_s),
        )
        return ServeSettings(
            cache_dir=os.path.join(settings.cache, "blocks"),
            cache_limit_bytes=settings.cache_limit_bytes,
            fetch=fetch,
            loop=settings.loop,
            fill=fill if settings.fill else None,
        )

    def _go_on(self, target: str, digest: str, opened: Opened) -> None:
        """All that the mount did not need: bytes, then recording, then what is kept."""
        folder = self._settings.traces or LocalStore(self._settings.cache).trace_folder(digest)
        cold = not opened.hot_set or not self._settings.hot
        if self._complete is not None:
            self._complete.begin(target)
        elif self._server is not None:
            self._server.begin(target, recorded=self._noting.active)
            if not self._noting.active:
                self._end_start_later(self._server)
        self._noting.run(folder, cold=cold, ended=self._recorded)
        threading.Thread(target=self._watch_mounts, name="image-mounts", daemon=True).start()
        try:
            opened.keep()
        except BootseerError as error:
            self._story.fault("keep", f"the image cannot be mounted again offline: {error}")
        settings = self._settings
        LocalStore(settings.cache).expire(
            [digest, *(server.digest for server in server_registry.known(settings.runtime))],
            limit_bytes=settings.kept_limit_bytes,
            unused=lambda other: server_registry.unused(settings.runtime, other),
        )

    def _end_start_later(self, server: ImageServer) -> None:
        """Where nothing is recorded, nothing else says when the start is over."""
        timer = threading.Timer(self._settings.record_window_s, server.start_is_over)
        timer.daemon = True
        timer.start()

    def _watch_mounts(self) -> None:
        """End the recording with the last mount here; what else has the image is served on."""
        told = self._state.server
        if told is None or not server_registry.until_unmounted(told, self._has_ended):
            return
        self._noting.close()
        self._state.leave()
        if told.sealed:  # whoever else has the image needs nobody
            _end()

    def _has_ended(self) -> bool:
        """Looked at every second: whose command was killed has no use for its tree any more."""
        container_folders.sweep(self._settings.runtime)
        server, told = self._server, self._state.server
        if server is not None and told is not None and server_registry.was_asked_to_end(told):
            server.give_up(ASKED_S)  # a program that waits in vain hears of no signal
        return self._ended.is_set()

    def _read_failed(self, offset: int, error: BaseException) -> None:
        """A reader got EIO; where the bytes are wrong at their source, no further start shall."""
        server = self._server
        came = (server.reads.waits, server.fetched().bytes) if server is not None else (0, 0)
        self._story.read_failed(offset, error, came)
        opened = self._opened
        if isinstance(error, CorruptDataError) and opened is not None:
            LocalStore(self._settings.cache).condemn(opened.digest, opened.block_image)

    # --- telling -------------------------------------------------------------------------

    def _about(
        self, digest: str, server: server_registry.Server, opened: Opened | None = None
    ) -> dict[str, Any]:
        return {
            "digest": digest,
            "workload": server.workload,
            "shared": opened is None,
            "loop": server.loop,
            "hot_set": opened.hot_set if opened and self._settings.hot else "",
            "hot_bytes": opened.hot_bytes if opened and self._settings.hot else 0,
            "offline": bool(opened and opened.offline),
            "complete": server.sealed,
            "notes": self._story.notes,
            "state": server.state,
        }

    def _data_key(self) -> str:
        assert self._opened is not None
        return self._opened.key()

    def _hot_done(self) -> None:
        _import_the_rest()
        if self._server is not None:
            self._story.replayed(self._server)

    def _recorded(self, merged: Trace | None) -> None:
        """The start is over: what comes now may be read ahead as usual."""
        server, opened = self._server, self._opened
        if server is not None and opened is not None:
            self._story.reads(server, opened.fetched_bytes)
            server.start_is_over()
            if merged is not None and self._settings.hot and not opened.published:
                from bootseer.imageprefetch.hotset import local_hotsets

                local_hotsets.offer(self._settings, opened, merged)

    # --- the end -------------------------------------------------------------------------

    def ending(self) -> None:
        """Nobody will be served any more; from `Mount.close`. Twice is safe."""
        if self._ended.is_set():
            return
        self._ended.set()
        told = self._state.server
        # Nobody asked for this end where the supervisor died: then what needs us not stays.
        if told is not None and not (told.sealed and told.supervisor != os.getppid()):
            server_registry.unmount_all(told)
        self._noting.close()
        if self._server is not None:
            if self._opened is not None:
                self._story.reads(self._server, self._opened.fetched_bytes)
            self._server.close()
        if self._complete is not None:
            self._complete.close()

    def ended(self) -> None:
        """The front is gone. Where the supervisor is gone too, nobody else cleans up."""
        told = self._state.server
        if told is not None and told.supervisor != os.getppid():
            self._state.remove()


class Front(ImageFront):
    """The front of a worker, which hears of its end."""

    def __init__(
        self,
        worker: Worker,
        *,
        released: Callable[[], None],
        failed: Callable[[int, BaseException], None],
    ) -> None:
        super().__init__(released=released, failed=failed)
        self._worker = worker

    def ending(self) -> None:
        """This side takes the mount away."""
        self._worker.ending()

    def destroy(self) -> None:
        super().destroy()
        self._worker.ended()


def _end() -> None:
    """End this process as its supervisor would; the supervisor ends with it."""
    os.kill(os.getpid(), signal.SIGTERM)


def _collect_garbage() -> None:
    """Collect from now on, as whoever mounts does not while importing; never what is imported."""
    gc.freeze()
    gc.enable()


def _import_the_rest() -> None:
    """Import what a read or the end may need later: the package may be replaced by then."""
    from bootseer.blockimage.serve import background_fill, page_cache_warmer
    from bootseer.blocks.cache import node_cache, sealed_objects
    from bootseer.blocks.fetch import fetcher
    from bootseer.imageprefetch.hotset import local_hotsets
    from bootseer.imageprefetch.record import trace_store
    from bootseer.storage.oci import layout_repository, registry_repository

    del (
        background_fill,
        page_cache_warmer,
        node_cache,
        fetcher,
        sealed_objects,
        local_hotsets,
        trace_store,
        layout_repository,
        registry_repository,
    )


def _plain(server: server_registry.Server) -> dict[str, Any]:
    return dataclasses.asdict(server)


def _without_hot(opened: Opened) -> BlockImage:
    frames = opened.image.frames
    if frames is not None:
        frames.close()
    return dataclasses.replace(opened.image, index=None, frames=None)
