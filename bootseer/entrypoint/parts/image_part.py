"""The image's files as a part of a start: read ahead alongside the job, and recorded."""

from __future__ import annotations

import os

from bootseer.config.sections import Config, ImageSettings
from bootseer.entrypoint.parts.part import Progress
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.events.writer import NullWriter

MIB = 1 << 20
MODULE = "bootseer.imageprefetch.filemode.background_recorder"


class ImagePart:
    """Reads ahead the files that earlier starts read; there is no plain way to fall back to."""

    name = "image"
    phase = "image.replay"

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        image = config.image
        if not image.traces or not image.enabled:
            return None
        if problem:
            return PartPlan(self.name, self.phase, None, reason=problem)
        return PartPlan(self.name, self.phase, _build_request(image), detached_module=MODULE)

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        from bootseer.imageprefetch.filemode import background_recorder

        background_recorder.run(request, writer, os.getppid())
        return 0

    def repair(self, request: Request) -> None:
        """Do nothing: a killed run leaves nothing behind but the kernel's page cache."""


def _build_request(image: ImageSettings) -> Request:
    """The fields of `background_recorder.StartSettings`, as plain values."""
    return {
        "place": image.traces,
        "image": image.image,
        "workload": image.workload,
        "roots": image.paths or ("/",),
        "record": image.record,
        "window_s": image.window_s,
        "share": image.share,
        "most_bytes": image.limit_mib * MIB or None,
        "options": {
            "user": image.user,
            "auth": image.auth,
            "token_file": image.token_file,
            "ca_file": image.ca_file,
            "redirects": image.redirects,
        },
    }
