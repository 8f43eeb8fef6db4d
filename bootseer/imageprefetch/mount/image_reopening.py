"""Opening a mounted image again, for a worker that takes over from one that died.

Its readers wait already, and no other process can ever serve them, so this never gives up. The
cache is enough if it has all of the image. Otherwise the registry is asked again and again, less
and less often, and readers get an input/output error when their time is over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.storage.retry import backoff_s

if TYPE_CHECKING:
    from bootseer.blockimage.serve.data_file import DataFile
    from bootseer.imageprefetch.resolve.resolver import ResolvedImage, Resolver

FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0
LOOK_S = 0.25  # between looks for reads that have waited too long


def reopen_image(
    resolver: Resolver,
    digest: str,
    block_image: str,
    *,
    file: DataFile,
    deadline_s: float,
    ended: threading.Event,
    say: Callable[[str, str], None],
) -> ResolvedImage | None:
    """The block image that is mounted, and no newer one; None when `ended`.

    Meanwhile reads of `file` that have waited for `deadline_s` fail.
    """
    done, last = threading.Event(), [BootseerError("the image is being opened again")]

    def expire() -> None:
        while not done.wait(LOOK_S):
            file.give_up(deadline_s, last[0])

    threading.Thread(target=expire, name="image-late", daemon=True).start()
    failures = 0
    try:
        while not ended.is_set():
            resolver.look.restart()
            try:
                return resolver.open(digest, block_image)
            except BootseerError as error:
                last[0] = error
            with contextlib.suppress(BootseerError):  # it may be missing in the registry only
                return resolver.open_kept(digest, block_image)
            say("take over", f"the image is asked for again and again: {last[0]}")
            failures += 1
            pause_s = backoff_s(failures, first_s=FIRST_DELAY_S, most_s=MOST_DELAY_S, error=last[0])
            ended.wait(pause_s)
        return None
    finally:
        done.set()
