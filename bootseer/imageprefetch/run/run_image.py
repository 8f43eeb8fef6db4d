"""`image run`: a container of an image that is mounted for as long as the container runs.

What keeps us from mounting keeps nobody from working: podman pulls the image then, as it would
without us.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_cache, default_runtime
from bootseer.errors import BootseerError, NotSupportedError, UsageError, describe
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import temporary_mounts
from bootseer.imageprefetch.mount.mount import Mounted, MountSettings
from bootseer.imageprefetch.run import podman_options
from bootseer.imageprefetch.run.podman_options import EVENTS_INSIDE
from bootseer.storage.oci.reference import parse_reference

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_cache import LocalStore
    from bootseer.imageprefetch.run.container import ImageConfig


_NOT_BEGUN = "not-begun"
_PODMANS_OWN_FAULT = 125
_NEVER_BEGAN = (_PODMANS_OWN_FAULT, 126, 127)
"""Codes of podman where it, or the runtime below it, did not come to start the command."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A container of the image `mount.ref`; the directory of `mount` is ours to choose.

    `options` are podman's. `words` take the place of the image's own command, if there are any.
    Events are shown to the container in `mount.events_dir`, if one is named.
    """

    mount: MountSettings
    options: Sequence[str] = ()
    words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Which way it went: what was mounted, or why podman pulls the image instead."""

    mounted: Mounted | None = None
    reason: str = ""


def run(
    settings: RunSettings,
    tell: Callable[[Way], None],
    mount: Callable[[MountSettings], Mounted] = mounting.mount,
    complain: Callable[[str], None] | None = None,
) -> int:
    """Run the container to its end; returns its exit code. `tell` is called before it begins.

    `complain` is called, by another thread, with each fault that the image's server, be it begun
    by this mount or another, meets while the container runs: a program that reads in vain hears
    of nothing but an input/output error.
    `mount` mounts, and raises, as `mounting.mount`.
    Raises UsageError for names that are none, and options that cannot be, and NotSupportedError
    where there is no podman. Call it in a process that has one thread.
    """
    parse_reference(settings.mount.ref)
    if not _is_installed("podman"):
        raise NotSupportedError(
            "running a container needs podman: install it, or use `bootseer image mount` and "
            "whatever runs containers here"
        )
    podman_options.check_options(
        settings.options, instead=", or use `bootseer image mount` and podman's --rootfs"
    )
    options = [*_events(settings.mount.events_dir), *settings.options]
    with contextlib.ExitStack() as stack:
        try:
            words, place, mounted = _mounted_words(settings, options, stack, tell, mount)
            digest, state = mounted.digest, mounted.state
            if complain is not None:
                from bootseer.imageprefetch.run.server_log import following

                stack.enter_context(following(mounted.state, settings.mount.ref, complain))
        except UsageError:
            raise
        except Exception as error:  # the border: whatever is wrong with us, podman can pull
            stack.close()
            tell(Way(reason=describe(error)))
            words, place, digest, state = _plain_words(settings, options), "", "", ""
        from bootseer.imageprefetch.mount import server_registry
        from bootseer.imageprefetch.run import container
        from bootseer.imageprefetch.run.container_folders import TREE

        tree = os.path.join(place, TREE)
        asked = functools.partial(server_registry.ask_to_end, state, tree) if state else _unheard
        code = container.run_foreground(words, asked)
        last = settings.options[-1] if settings.options else "-"
        if code == _PODMANS_OWN_FAULT and not last.startswith("-") and complain is not None:
            complain(f"if {last!r} is of the command to be run, put -- before that command")
        if code and place and complain and _lost_its_server(settings, place, digest):
            complain(
                f"the server of {settings.mount.ref} was killed while the container ran, which "
                "could read no more of its image; look who killed it (the kernel's log names "
                "those that memory ran out for), then start again"
            )
        if code in _NEVER_BEGAN and place:
            with contextlib.suppress(OSError), open(os.path.join(place, _NOT_BEGUN), "wb"):
                pass
        return code


def _unheard() -> None: ...


def _lost_its_server(settings: RunSettings, place: str, digest: str) -> bool:
    """Whether the tree of a container, whose own folder is `place`, is served no more."""
    from bootseer.imageprefetch.mount import server_registry
    from bootseer.imageprefetch.run.container_folders import TREE
    from bootseer.system.mountinfo import all_mounts, shown_at

    try:
        servers = server_registry.known(
            os.path.abspath(settings.mount.runtime or default_runtime())
        )
        shown = shown_at(all_mounts(), os.path.join(place, TREE))
    except OSError:  # the container's own end is what counts
        return False
    if shown is None:  # what served it took it away when it ended, or somebody else did
        mine = [one for one in servers if one.digest == digest]
        return not any(one.sealed or server_registry.lives(one) for one in mine)
    server = next((one for one in servers if server_registry.is_of(one, shown)), None)
    return server is not None and not server.sealed and not server_registry.lives(server)


def import_the_rest() -> None:
    """Import what a container's run needs besides its mount, while that is coming up."""
    from bootseer.imageprefetch import image_cache
    from bootseer.imageprefetch.run import container, image_config
    from bootseer.storage.oci import manifest

    del image_config, image_cache, container, manifest


def _is_installed(program: str) -> bool:
    """Whether a program is on the path; `shutil.which` would take milliseconds to import."""
    paths = (os.path.join(folder, program) for folder in os.get_exec_path())
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)


def _mounted_words(
    settings: RunSettings,
    options: Sequence[str],
    stack: contextlib.ExitStack,
    tell: Callable[[Way], None],
    mount: Callable[[MountSettings], Mounted],
) -> tuple[list[str], str, Mounted]:
    """Mount until `stack` is left; the command line, a folder for its time, what was mounted."""
    podman_options.check_platform(options)
    place = os.path.abspath(settings.mount.runtime or default_runtime())
    stack.enter_context(temporary_mounts.ending())
    tree = stack.enter_context(temporary_mounts.directory(place))
    stack.enter_context(temporary_mounts.unmounting(tree, place))
    own = os.path.dirname(tree)
    wanted = dataclasses.replace(
        settings.mount,
        directory=tree,
        platform_known=True,  # its config, which we read anyway, tells
        not_begun=os.path.join(own, _NOT_BEGUN),
    )
    begun_s = settings.mount.look_begun_s or time.monotonic()
    mounted = mount(wanted)
    from bootseer.imageprefetch.run import container

    config = _config(settings.mount, mounted.digest, begun_s)
    words = container.container_words(tree, config, options, settings.words)
    tell(Way(mounted))
    return words, own, mounted


def _plain_words(settings: RunSettings, options: Sequence[str]) -> list[str]:
    insecure = ["--tls-verify=false"] if _asks_plainly(settings.mount) else []
    words = ["podman", "run", "--rm", *insecure, *options]
    return [*words, settings.mount.ref, *settings.words]


def _asks_plainly(mount: MountSettings) -> bool:
    """Whether the registry is asked without TLS: podman then must not insist on it."""
    from bootseer.storage.oci.open import open_repository

    if mount.plain_http is not None:
        return mount.plain_http
    try:
        with open_repository(mount.ref, mount.options)[0] as repository:
            return repository.plain_http
    except BootseerError:  # podman knows better what is wrong with it
        return False


def _events(folder: str) -> list[str]:
    """Podman's options that show a directory of events to the container."""
    if not folder:
        return []
    folder = os.path.abspath(folder)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not os.path.isdir(folder):
        return []
    return ["--volume", f"{folder}:{EVENTS_INSIDE}", "--env", f"BOOTSEER_EVENTS={EVENTS_INSIDE}"]


def _config(mount: MountSettings, digest: str, begun_s: float) -> ImageConfig:
    """How the image wants to be run, kept on this node. Raises what the registry raises.

    The first look at the registry, of which this is the last part, began at `begun_s`.
    """
    from bootseer.imageprefetch.image_cache import LocalStore
    from bootseer.imageprefetch.run import container, image_config

    local = LocalStore(os.path.abspath(mount.cache or default_cache()))
    raw = image_config.kept(digest, local)
    if raw is None:
        raw = _fetched_config(mount, digest, local, begun_s)
    image_config.check_machine(raw, mount.ref)
    return container.parse_config(raw)


def _fetched_config(mount: MountSettings, digest: str, local: LocalStore, begun_s: float) -> bytes:
    from bootseer.imageprefetch.resolve.deadline import BoundedRepository, FirstLook
    from bootseer.imageprefetch.run import image_config
    from bootseer.storage.oci.open import open_repository

    repository, _ = open_repository(mount.ref, mount.options, plain_http=mount.plain_http)
    look = FirstLook(mount.ref, mount.look_s, lambda: None, begun_s=begun_s)
    with BoundedRepository(lambda: repository, look) as bounded:
        image, manifest = bounded.image(digest)
        return image_config.fetch_and_keep(bounded, image, manifest, local)
