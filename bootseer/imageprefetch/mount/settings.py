"""The settings of one image mount, and their text form for a process that mounts on demand."""

from __future__ import annotations

import json

from bootseer import light_dataclasses as dataclasses
from bootseer.light_dataclasses import dataclass
from bootseer.storage.options import DEFAULTS, StoreOptions

WINDOW_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """One mount of the image `ref` at `directory`, which exists.

    - `cache`, `runtime`: "" for this node's usual places. The cache's blocks take at most
      `cache_limit_bytes`, everything else that is kept of images at most `kept_limit_bytes`.
    - `fill`: once the start is over, or nothing has been read for a while, fetch what it did not
      read, at `fill_rate_bytes_s` at most (0: no limit).
    - `record`: merge what programs read into the workload's trace, in the folder `traces` ("":
      the image's own in the cache), until the first step, which an event in `events_dir` reports,
      or for `record_window_s`. If the file `not_begun` exists at the unmount, the command never
      started, and nothing is recorded.
    - `deadline_s`: a read that has received no bytes for so long fails.
    - `look_s`: the limit of all requests to the registry before the mount; it is exceeded only
      while answers keep coming. It counts from `look_begun_s` of the monotonic clock, or (0) from
      the first request.
    - `loop`: mount over loop devices (None: where the kernel needs them).
    - `hot`: replay the hot set.
    - `eager`: where there is no hot set, fetch all of the image at once.
    - `missing_ok`: that there is no such image, or no block image of it, is no fault to report.
    - `share`: other mounts of the image on this node may use this mount's server.
    - `nosuid`: setuid programs and devices of the image do not work at `directory`.
    - `platform_known`: the caller has checked the image's platform; otherwise an image of another
      platform than this machine's is refused.
    """

    ref: str
    directory: str
    workload: str = ""
    cache: str = ""
    cache_limit_bytes: int = 64 << 30
    kept_limit_bytes: int = 16 << 30
    runtime: str = ""
    fill: bool = True
    fill_rate_bytes_s: int = 64 << 20
    record: bool = True
    record_window_s: float = WINDOW_S
    traces: str = ""
    events_dir: str = ""
    options: StoreOptions = DEFAULTS
    plain_http: bool | None = None
    deadline_s: float = 60.0
    look_s: float = 120.0
    look_begun_s: float = 0.0
    memory_bytes: int = 128 << 20
    loop: bool | None = None
    hot: bool = True
    eager: bool = False
    missing_ok: bool = False
    nosuid: bool = False
    share: bool = True
    log_file: str = ""
    not_begun: str = ""
    platform_known: bool = False


def encode_settings(settings: MountSettings) -> str:
    """Settings as JSON, for `decode_settings`."""
    return json.dumps(dataclasses.asdict(settings))


def decode_settings(text: str | bytes) -> MountSettings:
    """The settings that `encode_settings` was given."""
    fields = json.loads(text)
    options = fields.pop("options")
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    return MountSettings(**fields, options=StoreOptions(**{**options, **lists}))
