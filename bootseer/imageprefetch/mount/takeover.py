"""Opening a mounted image again, for a server that takes over from one that died.

Its readers wait already, and nobody else can ever serve them: so this never gives up. What this
node keeps of the image is enough. Where that is not all, the registry is asked again and again,
less and less often, and readers get an input/output error when their time is over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError

if TYPE_CHECKING:
    from bootseer.blockimage.serve.data_file import DataFile
    from bootseer.imageprefetch.resolve.resolver import Opened, Resolver

FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0
LOOK_S = 0.25  # between looks at who has waited too long


def reopened(
    resolver: Resolver,
    digest: str,
    block_image: str,
    *,
    file: DataFile,
    deadline_s: float,
    ended: threading.Event,
    say: Callable[[str, str], None],
) -> Opened | None:
    """The very block image that is mounted, for another's bytes lie elsewhere; None when `ended`.

    Meanwhile reads of `file` that have waited for `deadline_s` fail.
    """
    done, last = threading.Event(), [BootseerError("the image is being opened again")]

    def expire() -> None:
        while not done.wait(LOOK_S):
            file.give_up(deadline_s, last[0])

    threading.Thread(target=expire, name="image-late", daemon=True).start()
    delay_s = FIRST_DELAY_S
    try:
        while not ended.is_set():
            resolver.look.restart()
            try:
                return resolver.open(digest, block_image)
            except BootseerError as error:
                last[0] = error
            with contextlib.suppress(BootseerError):  # it may be gone from the registry alone
                return resolver.open_kept(digest, block_image)
            say("take over", f"the image is asked for again and again: {last[0]}")
            ended.wait(delay_s)
            delay_s = min(MOST_DELAY_S, 2 * delay_s)
        return None
    finally:
        done.set()
