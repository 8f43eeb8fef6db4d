"""The process that serves a mounted image: brings it up, or takes over from one that died."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import erofs_mount
from bootseer.blockimage.serve.data_file import DataFile
from bootseer.blockimage.serve.opened_image import without_hot_set
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, StoreUnavailableError
from bootseer.fuse.serve.daemon import Send, encode_error, send_waiting
from bootseer.imageprefetch.image_cache import BLOCKS, ImageCache
from bootseer.imageprefetch.mount import container_folders, server_registry
from bootseer.imageprefetch.mount.mount_events import MOUNT, FaultLog, MountEvents
from bootseer.imageprefetch.mount.readahead_notices import ReadaheadNotices
from bootseer.imageprefetch.record.start_recording import ServerRecording
from bootseer.imageprefetch.resolve.resolver import ResolvedImage, Resolver
from bootseer.storage import retry
from bootseer.storage.oci.reference import parse_reference

if TYPE_CHECKING:
    from _socket import socket

    from bootseer.blockimage.erofs_mount import Erofs
    from bootseer.blockimage.serve.image_server import ImageServer, ServeSettings
    from bootseer.blockimage.serve.serverless_mount import CompleteImage
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.mount.settings import MountSettings


END_WAIT_S = 5.0
"""How long reads of a container that was asked to end may wait while no bytes arrive."""


class Worker:
    """One process's part in an image server; `file` is what its FUSE mount serves.

    `send` answers the caller of the mount, `say` writes to the log, `helper` is the link of a
    registry helper.
    """

    def __init__(
        self,
        settings: MountSettings,
        state: server_registry.ServerFolder,
        send: Send,
        say: Callable[[str], None],
        faults: FaultLog,
        helper: socket | None = None,
    ) -> None:
        self._settings, self._state, self._send, self._helper = settings, state, send, helper
        self._events = MountEvents(
            settings.ref,
            settings.workload,
            say,
            faults,
            events.open_writer(),
            again_s=settings.deadline_s,
        )
        self._server: ImageServer | None = None
        self._complete: CompleteImage | None = None  # instead of a server
        self._resolved: ResolvedImage | None = None
        self._ended = threading.Event()
        self.file = DataFile(
            on_release=_end,
            on_error=self._read_failed,
            on_unmount=self._before_unmount,
            on_end=self._after_unmount,
            is_announced=ReadaheadNotices(state.folder).covers,
        )
        self._recording = ServerRecording(
            self.file,
            os.path.join(state.folder, server_registry.TOUCHES),
            self._data_key,
            wanted=settings.record,
            workload=settings.workload,
            window_s=settings.record_window_s,
            events_dir=settings.events_dir,
            not_begun=settings.not_begun,
        )

    def start(self) -> DataFile:
        """Bring the image up, or take over from a worker that died, in the background."""
        previous = self._state.server
        if previous is not None and not previous.sealed:  # its readers wait for answers already
            self.file.set_size(previous.data_bytes)
            self.file.take_over(previous.handle, behind_loop=previous.loop)
            self._recording.resume(previous.data_bytes)
        work = self._bring_up if previous is None else lambda: self._take_over(previous)
        threading.Thread(target=self._guard, args=(work,), name="image-up", daemon=True).start()
        return self.file

    # --- coming up -----------------------------------------------------------------------

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # a border: the caller gets the error, and this server ends
            self._recording.drop()
            is_usual = isinstance(error, NotFoundError) and self._settings.missing_ok
            if is_usual:
                self._events.report_missing()
            else:
                self._events.report_mount_failure(error)
            self._answer(encode_error(error))
            if not is_usual:
                self._events.fault("mount", str(error))
            _end()

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            self._send(answer)
        except OSError:
            pass  # the caller has ended

    def _hand_over(self, mounted: dict[str, Any], server: server_registry.ServerRecord) -> None:
        """Answer the caller, whose the mount is from now on; raises where it has ended."""
        try:
            self._send({"mounted": mounted, "server": dataclasses.asdict(server)})
        except OSError as error:
            raise StoreUnavailableError("not mounted, as who asked for it has ended") from error

    def _resolver(self) -> Resolver:
        settings = self._settings
        return Resolver.begin(
            settings.ref,
            ImageCache(settings.cache),
            workload=settings.workload,
            options=settings.options,
            plain_http=settings.plain_http,
            look_s=settings.look_s,
            look_begun_s=settings.look_begun_s,
            spare_meta=os.path.join(self._state.folder, server_registry.SPARE_META),
            note=self._events.note,
            helper=self._helper,
            platform_known=settings.platform_known,
        )

    def _bring_up(self) -> None:
        self._events.begin(MOUNT)
        resolver = self._resolver()
        retry.wait_listener = lambda *report: send_waiting(self._send, *report)
        try:
            self._mount_resolved(resolver)
        finally:
            retry.wait_listener = None
            resolver.dismiss_helper()

    def _mount_resolved(self, resolver: Resolver) -> None:
        settings, state = self._settings, self._state
        digest = resolver.digest()
        with server_registry.lock_image(settings.runtime, digest):
            other = self._other(digest)
            if other is not None:
                self._share(digest, other)
                return
            resolved = self._resolved = resolver.open(digest)
            resolver.dismiss_helper()
            os.symlink(resolved.image.meta_path, state.meta)
            image = dataclasses.replace(resolved.image, meta_path=state.meta)
            mounted = self._mount(digest, dataclasses.replace(resolved, image=image))
            if settings.nosuid:
                erofs_mount.restrict(settings.directory, nosuid=True)
            is_complete = self._complete is not None
            server = server_registry.ServerRecord(
                digest=digest,
                block_image=resolved.block_image,
                workload=settings.workload,
                device=mounted.device,
                source=mounted.source,
                handle=self.file.last_handle,
                data_bytes=resolved.image.data_bytes,
                loop=mounted.loop,
                shared=settings.share,
                state=state.folder,
                supervisor=os.getppid(),
                sealed=is_complete,
                bdis=mounted.bdis,
            )
            state.register(server)
            if not is_complete:
                self._recording.begin(resolved.image.data_bytes)  # before the first read
            try:
                self._hand_over(self._describe(digest, server, resolved), server)
            except BaseException:  # before another mount can share it
                server_registry.unmount_all(server)
                raise
        _collect_garbage()
        hot = bool(resolved.hot_set) and settings.hot
        self._events.report_mounted(resolved, hot=hot, loop=server.loop, complete=is_complete)
        self._go_on(settings.directory, digest, resolved)

    def _mount(self, digest: str, resolved: ResolvedImage) -> Erofs:
        """Mount without a server, where all of the image is on this node, else over our server."""
        from bootseer.imageprefetch.mount import serverless_choice

        directory = self._settings.directory
        complete = serverless_choice.choose_serverless(
            self._settings, digest, resolved, self._events.fault
        )
        if complete is not None:
            try:
                mounted = complete.mount(directory)
            except BootseerError as error:  # serving it reports what is really wrong
                complete.give_up()
                self._events.fault("complete", f"it is served, though all of it is here: {error}")
            else:
                self._complete = complete
                return mounted
        return self._make_server(resolved).mount(self._state.front, directory)

    def _other(self, digest: str) -> server_registry.ServerRecord | None:
        """Another server of this image, if all of the image is visible at some path.

        Also removes what dead servers have left.
        """
        for server in server_registry.list_servers(self._settings.runtime):
            if server.digest != digest or not (server.shared and self._settings.share):
                continue
            if server_registry.whole_paths(server):
                return server
        return None

    def _share(self, digest: str, other: server_registry.ServerRecord) -> None:
        """Use another server, which replays only the hot set of its own workload."""
        _collect_garbage()
        self._events.report_shared()
        self._hand_over(self._describe(digest, other), other)
        if not self._settings.hot or self._settings.workload == other.workload:
            _end()
            return
        # In a thread of its own, because the caller holds the image's lock.
        replay = threading.Thread(target=lambda: self._replay(other), name="image-beside")
        replay.daemon = True
        replay.start()

    def _replay(self, other: server_registry.ServerRecord) -> None:
        """Read this mount's hot set ahead through the other server while the image is mounted."""
        from bootseer.imageprefetch.mount.hotset_replay import replay_while_mounted

        try:
            result = replay_while_mounted(self._settings, other)
            if result is not None:
                self._events.report_read_ahead(result)
        except Exception as error:  # a border: the tree is there, and works without it
            self._events.fault("replay", f"the hot set was not replayed: {error}")
        finally:
            _end()

    def _take_over(self, previous: server_registry.ServerRecord) -> None:
        """Serve an image that is mounted already, and whose readers wait."""
        _collect_garbage()
        if previous.sealed:  # no reader waits for a server
            self._watch_mounts()
            return
        resolved = self._resolved = self._reopen(previous)
        if resolved is None:  # unmounted meanwhile
            self._recording.drop()
            return
        server = self._make_server(resolved)
        server.adopt(previous.bdis)
        mounts = server_registry.whole_paths(previous)
        if not mounts:
            server.settings = dataclasses.replace(server.settings, warm=False)
        self._go_on(mounts[0] if mounts else "", previous.digest, resolved)

    def _reopen(self, previous: server_registry.ServerRecord) -> ResolvedImage | None:
        from bootseer.imageprefetch.mount.image_reopening import reopen_image

        return reopen_image(
            self._resolver(),
            previous.digest,
            previous.block_image,
            file=self.file,
            deadline_s=self._settings.deadline_s,
            ended=self._ended,
            say=self._events.fault,
        )

    def _make_server(self, resolved: ResolvedImage) -> ImageServer:
        from bootseer.blockimage.serve.image_server import ImageServer

        image = resolved.image if self._settings.hot else without_hot_set(resolved.image)
        server = ImageServer(
            image,
            self.file,
            self._serve_settings(resolved.digest),
            say=self._events.fault,
            hot_done=self._hot_done,
        )
        self._server = server
        return server

    def _serve_settings(self, digest: str) -> ServeSettings:
        from bootseer.blockimage.serve.fill_settings import FillSettings
        from bootseer.blockimage.serve.image_server import ServeSettings
        from bootseer.blocks.link_turns import LinkTurns
        from bootseer.blocks.settings import DEFAULTS as FETCH

        settings = self._settings
        lock = ImageCache(settings.cache).fill_lock(digest)
        fill = FillSettings(rate_bytes_s=settings.fill_rate_bytes_s, lock=lock)
        fetch = dataclasses.replace(
            FETCH,
            memory_bytes=settings.memory_bytes,
            demand_deadline_s=settings.deadline_s,
            stall_s=min(FETCH.stall_s, settings.deadline_s),
        )
        return ServeSettings(
            cache_dir=os.path.join(settings.cache, BLOCKS),
            cache_limit_bytes=settings.cache_limit_bytes,
            fetch=fetch,
            loop=settings.loop,
            fill=fill if settings.fill else None,
            turns=LinkTurns.of(settings.runtime),
            eager=settings.eager,
        )

    def _go_on(self, target: str, digest: str, resolved: ResolvedImage) -> None:
        """Do what the mount could do without: fetch bytes, then record, then fill the cache."""
        folder = self._settings.traces or ImageCache(self._settings.cache).trace_folder(digest)
        cold = not resolved.hot_set or not self._settings.hot
        if self._complete is not None:
            self._complete.begin(target)
        elif self._server is not None:
            self._server.begin(target, recorded=self._recording.is_active)
            if not self._recording.is_active:
                self._end_start_later(self._server)
        self._recording.run(folder, cold=cold, ended=self._recording_ended)
        threading.Thread(target=self._watch_mounts, name="image-mounts", daemon=True).start()
        try:
            resolved.keep()
        except BootseerError as error:
            self._events.fault("keep", f"the image cannot be mounted again offline: {error}")
        settings = self._settings
        ImageCache(settings.cache).expire(
            [digest, *(server.digest for server in server_registry.list_records(settings.runtime))],
            limit_bytes=settings.kept_limit_bytes,
            lock_unused=lambda other: server_registry.lock_if_unused(settings.runtime, other),
        )

    def _end_start_later(self, server: ImageServer) -> None:
        """Take the start for over after a while, as no recording says when it is."""
        timer = threading.Timer(self._settings.record_window_s, server.start_is_over)
        timer.daemon = True
        timer.start()

    def _watch_mounts(self) -> None:
        """End the recording with the last mount here; mounts elsewhere are served on."""
        record = self._state.server
        if record is None or not server_registry.await_unmount(record, self._has_ended):
            return
        self._recording.close()
        self._state.mark_left()
        if record.sealed:  # mounts elsewhere need no server
            _end()

    def _has_ended(self) -> bool:
        """Called every second: also sweeps the trees of commands that were killed."""
        container_folders.sweep(self._settings.runtime)
        server, record = self._server, self._state.server
        if server is not None and record is not None and server_registry.is_asked_to_end(record):
            server.give_up(END_WAIT_S)  # a program that waits for bytes does not see its signal
        return self._ended.is_set()

    def _read_failed(self, offset: int, error: BaseException) -> None:
        """Report that a reader got EIO; wrong bytes at their source must spoil no further start."""
        server = self._server
        came = (server.reads.waits, server.count_fetched().bytes) if server is not None else (0, 0)
        self._events.read_failed(offset, error, came)
        resolved = self._resolved
        if isinstance(error, CorruptDataError) and resolved is not None:
            ImageCache(self._settings.cache).condemn(resolved.digest, resolved.block_image)

    # --- answers and events --------------------------------------------------------------

    def _describe(
        self,
        digest: str,
        server: server_registry.ServerRecord,
        resolved: ResolvedImage | None = None,
    ) -> dict[str, Any]:
        """The fields of `MountedImage`; without `resolved` for another server's image."""
        return {
            "digest": digest,
            "workload": server.workload,
            "shared": resolved is None,
            "loop": server.loop,
            "hot_set": resolved.hot_set if resolved and self._settings.hot else "",
            "hot_bytes": resolved.hot_bytes if resolved and self._settings.hot else 0,
            "offline": bool(resolved and resolved.offline),
            "complete": server.sealed,
            "notes": self._events.notes,
            "state": server.state,
        }

    def _data_key(self) -> str:
        assert self._resolved is not None
        return self._resolved.key()

    def _hot_done(self) -> None:
        _import_the_rest()
        if self._server is not None:
            self._events.report_replayed(self._server)

    def _recording_ended(self, merged: Trace | None) -> None:
        """The start is over: from now on the kernel may read ahead as usual."""
        server, resolved = self._server, self._resolved
        if server is not None and resolved is not None:
            self._events.reads(server, resolved.fetched_bytes)
            server.start_is_over()
            if merged is not None and self._settings.hot and not resolved.published:
                self._pack(resolved, merged)

    def _pack(self, resolved: ResolvedImage, merged: Trace) -> None:
        """Pack a trace that was recorded for this node, for its next mount."""
        from bootseer.imageprefetch.hotset import local_packer

        settings = self._settings
        if not settings.traces:
            job = local_packer.PackJob(
                ref=parse_reference(settings.ref).with_digest(resolved.digest),
                digest=resolved.digest,
                block_image=resolved.block_image,
                workload=settings.workload,
                cache=settings.cache,
                cache_limit_bytes=settings.cache_limit_bytes,
                plain_http=settings.plain_http,
            )
            local_packer.start_if_due(job, merged)

    # --- the end -------------------------------------------------------------------------

    def _before_unmount(self) -> None:
        """End serving; twice is safe."""
        if self._ended.is_set():
            return
        self._ended.set()
        record = self._state.server
        # If the supervisor died, no one asked for this end: a mount that needs no server stays.
        if record is not None and not (record.sealed and record.supervisor != os.getppid()):
            server_registry.unmount_all(record)
        self._recording.close()
        if self._server is not None:
            if self._resolved is not None:
                self._events.reads(self._server, self._resolved.fetched_bytes)
            self._server.close()
        if self._complete is not None:
            self._complete.close()

    def _after_unmount(self) -> None:
        """The FUSE mount has ended. If the supervisor died, it cannot clean up."""
        record = self._state.server
        if record is not None and record.supervisor != os.getppid():
            self._state.remove()


def _end() -> None:
    """End this process as its supervisor would; the supervisor ends with it."""
    os.kill(os.getpid(), signal.SIGTERM)


def _collect_garbage() -> None:
    """Collect garbage again, as the caller switched it off for imports; never what is imported."""
    gc.freeze()
    gc.enable()


def _import_the_rest() -> None:
    """Import what reads or the end may need later: the package may have been replaced by then."""
    from bootseer.blockimage.serve import background_fill, page_cache_warmer
    from bootseer.blocks.cache import node_cache, sealed_objects
    from bootseer.blocks.fetch import fetcher
    from bootseer.imageprefetch.hotset import local_packer
    from bootseer.imageprefetch.record import trace_store
    from bootseer.storage import token_files
    from bootseer.storage.oci import layout_repository, registry_repository
    from bootseer.storage.oci import open as oci_open

    del (
        background_fill,
        page_cache_warmer,
        node_cache,
        fetcher,
        sealed_objects,
        local_packer,
        trace_store,
        layout_repository,
        oci_open,
        registry_repository,
        token_files,
    )
