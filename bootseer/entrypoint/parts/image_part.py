"""The image's files as a part of a start: read ahead beside the job, recorded for the next."""

from __future__ import annotations

import os

from bootseer.config.sections import Config, ImageSettings
from bootseer.entrypoint.parts.part import Progress
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.events.writer import NullWriter

MIB = 1 << 20
MODULE = "bootseer.imageprefetch.filemode.background_recorder"


class ImagePart:
    """Reads ahead what earlier starts read of `[image]`; there is no plain way to fall back to."""

    name = "image"
    phase = "image.replay"

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        image = config.image
        if not image.traces or not image.enabled:
            return None
        if problem:
            return PartPlan(self.name, self.phase, None, reason=problem)
        return PartPlan(self.name, self.phase, _request(image), beside=MODULE)

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        from bootseer.imageprefetch.filemode import background_recorder

        background_recorder.run(request, writer, os.getppid())
        return 0

    def repair(self, request: Request) -> None:
        """Nothing is ever half done: only the kernel's page cache is filled."""


def _request(image: ImageSettings) -> Request:
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
