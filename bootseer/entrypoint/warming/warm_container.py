"""The image and the dependency layer of a container, whole on this node.

The image is mounted meanwhile, for what a layer's name depends on lies in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from bootseer import events
from bootseer import light_dataclasses as light
from bootseer.config.sections import DepsSettings
from bootseer.entrypoint.container.deps_layer import DepsLayer, Surroundings
from bootseer.entrypoint.warming.node_state import Part, PartState
from bootseer.errors import BootseerError, NotFoundError
from bootseer.imageprefetch import image_fill
from bootseer.imageprefetch.image_fill import LocalImage
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount.interrupts import exit_on_signals
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.run import temporary_mounts
from bootseer.imageprefetch.run.run_image import ImageAtHand, InputFailedError, mounted_config
from bootseer.light_dataclasses import dataclass

_NO_IMAGE = "known once the image is on this node"
_NO_LAYER = "the install has to run: no start with these inputs has published its result"


@dataclass(frozen=True, slots=True)
class ContainerWarming:
    """Warms for containers of `mount.ref` that run with podman's `options`.

    `say` gets what is not as usual. Call its methods in a process that has one thread.
    """

    mount: MountSettings
    deps: DepsSettings
    options: Sequence[str]
    writer: events.NullWriter
    environ: Mapping[str, str]
    say: Callable[[str], None]

    def warm(self) -> list[PartState]:
        """Bring the image and the layer, which is made where nobody has made it yet."""
        with exit_on_signals():
            try:
                layer, failure = self._publish_layer()
            except (BootseerError, OSError) as error:
                return [PartState.failed("image", self.mount.ref, error)]
            states = [self._fill("image", self.mount.ref)]
            if failure is not None:
                states.append(failure)
            elif layer:
                states.append(self._fill("deps", layer))
            return states

    def look(self) -> list[PartState]:
        """What is on this node; mounts the image only if it is."""
        try:
            local = image_fill.look_at_image(self.mount, self.say)
        except (BootseerError, OSError) as error:
            return [PartState.failed("image", self.mount.ref, error)]
        image = _state_of("image", local, self.mount.ref)
        if not self.has_layer:
            return [image]
        if not image.ready:
            return [image, PartState("deps", "", ready=False, reason=_NO_IMAGE)]
        try:
            with self._mounted() as layer:
                ref = layer.name()
            settings = light.replace(self.mount, ref=ref)
            try:
                local = image_fill.look_at_image(settings, self.say)
            except NotFoundError:
                return [image, PartState("deps", ref, ready=False, reason=_NO_LAYER)]
            return [image, _state_of("deps", local, ref)]
        except (BootseerError, OSError) as error:
            return [image, PartState.failed("deps", "", error)]

    @property
    def has_layer(self) -> bool:
        return bool(self.deps.install) and self.deps.enabled

    def _publish_layer(self) -> tuple[str, PartState | None]:
        """Have the registry hold the layer; returns its name ("" for none), or what failed."""
        with self._mounted() as layer:
            if not self.has_layer:
                return "", None
            try:
                return layer.publish_if_missing(), None
            except InputFailedError as failure:
                if failure.by_signal:  # which was for all of us
                    raise SystemExit(failure.exit_code) from None
                reason = f"the install ended with exit code {failure.exit_code}"
                code = failure.exit_code
                return "", PartState("deps", "", ready=False, reason=reason, exit_code=code)
            except (BootseerError, OSError) as error:
                return "", PartState.failed("deps", "", error)

    def _fill(self, part: Part, ref: str) -> PartState:
        settings = light.replace(self.mount, ref=ref)
        try:
            return _state_of(part, image_fill.fill_image(settings, self.say), ref)
        except (BootseerError, OSError) as error:
            return PartState.failed(part, ref, error)

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[DepsLayer]:
        """Mount the image by a server of its own, which fetches no more than is read."""
        runtime = self.mount.runtime
        with contextlib.ExitStack() as stack:
            tree = stack.enter_context(temporary_mounts.directory(runtime))
            stack.enter_context(temporary_mounts.unmounting(tree, runtime))
            settings = light.replace(
                self.mount,
                directory=tree,
                hot=False,
                fill=False,
                record=False,
                share=False,
                platform_known=True,
            )
            mounted = mounting.mount(settings)
            config = mounted_config(self.mount, mounted.digest)
            surroundings = Surroundings(
                self.deps,
                self.mount,
                os.path.dirname(tree),
                mounting.mount,
                self.writer,
                self.environ,
            )
            image = ImageAtHand(tree, mounted.digest, config, self.options)
            layer = DepsLayer(surroundings, image)
            stack.callback(layer.close)
            yield layer


def _state_of(part: Part, local: LocalImage, ref: str) -> PartState:
    name = f"{ref}@{local.digest}"
    return PartState(part, name, local.complete, local.present_bytes, local.total_bytes)
