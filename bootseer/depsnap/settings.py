"""The settings of `deps run` and `deps restore`."""

from __future__ import annotations

from collections.abc import Mapping

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.types import Step, no_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Wait = Literal["auto", "always", "never"]
    FormAsked = Literal[
        "auto", "overlay", "bind", "symlink", "reflink", "hardlink", "copy", "archive"
    ]
    PublishMode = Literal["background", "inline"]

DAY_S = 86400.0


@dataclasses.dataclass(frozen=True, slots=True)
class DepsSettings:
    """Settings of one `deps run` or `deps restore`.

    `cache` is the node's directory for locks and notes; shared trees are kept there when
    `share_trees` says that it outlives this start. `wait_limit_s` bounds every wait for another
    node, `wait` `always` included. `publish_stall_s` is how long packing into a store that may
    hang may make no progress: writing out a large archive is one request.
    """

    store: str
    cache: str
    environ: Mapping[str, str]
    cwd: str
    key_files: tuple[str, ...] = ()
    key_env: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    wait: Wait = "auto"
    wait_limit_s: float = 1800.0
    form: FormAsked = "auto"
    share_trees: bool = False
    writable: bool = True
    publish: PublishMode = "background"
    max_age_s: float = 7 * DAY_S
    sign_key: str | None = None
    allow_setuid: bool = False
    image_digest: str = ""
    resolve_timeout_s: float = 5.0
    store_timeout_s: float = 4.0
    publish_stall_s: float = 30.0
    lease_beat_s: float = 3.0
    lease_ttl_s: float = 20.0
    on_step: Step = no_step
