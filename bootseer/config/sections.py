"""The sections of `bootseer.toml`: every setting's name, type, default, choices and help.

These records are the one place that owns them; the reader, the checks and the documentation are
made from them. Pure: no file, no environment.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal, TypeVar

from bootseer.light_dataclasses import dataclass, field

_T = TypeVar("_T")


def _setting(
    default: _T, help_text: str, *, env: str = "", minimum: float | None = None, words: bool = False
) -> _T:
    """A field with what the reader and the documentation need; `words`: a command line."""
    metadata = {"help": help_text, "env": env, "minimum": minimum, "words": words}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """`[job]`: the job's name and how it is watched."""

    events: str = _setting(
        "",
        "Directory for event files (or one `.jsonl` file). Empty: the user's state directory.",
        env="BOOTSEER_EVENTS",
    )
    uid: str = _setting(
        "", "Name shared by all processes and attempts of the job. Empty: from the scheduler."
    )
    attempt: int = _setting(
        0, "Number of this start of the job; 0 is the first.", env="BOOTSEER_ATTEMPT", minimum=0
    )
    log_rules: tuple[str, ...] = _setting(
        (), "Rule files or shipped rules (`torchrun`, `huggingface`, ...) for the job's output."
    )
    phase: str = _setting(
        "", "Measure the whole job as this phase; like `log_rules`, this keeps bootseer in front."
    )
    import_times: bool = _setting(False, "Record the heaviest imports of the job's Python.")


@dataclass(frozen=True, slots=True)
class DepsSettings:
    """`[deps]`: what installs the dependencies, and how their snapshot is kept and restored."""

    enabled: bool = _setting(True, "False: `install` runs plainly, without a snapshot.")
    install: tuple[str, ...] = _setting(
        (),
        "Command that installs the dependencies. Empty: this part has nothing to do.",
        words=True,
    )
    key_files: tuple[str, ...] = _setting(
        (), "Files whose contents decide what is installed (`requirements.txt`, a lock file)."
    )
    also: tuple[str, ...] = _setting(
        (), "Further directories that the command changes and that belong to the snapshot."
    )
    exclude: tuple[str, ...] = _setting((), "Patterns of paths that stay out of the snapshot.")
    key_env: tuple[str, ...] = _setting(
        (), "Names of environment variables whose values decide what is installed."
    )
    store: str = _setting(
        "",
        "Directory shared by the nodes, or URL, that holds snapshots. Empty: the user's data "
        "directory.",
        env="BOOTSEER_STORE",
    )
    cache: str = _setting(
        "",
        "Directory of this node, kept between starts: snapshots are unpacked there once and then "
        "shared. Empty: nothing is shared; notes are kept in the user's cache.",
        env="BOOTSEER_CACHE",
    )
    wait: Literal["auto", "always", "never"] = _setting(
        "auto", "Whether to wait for another node that is installing the same at this moment."
    )
    form: Literal[
        "auto", "overlay", "bind", "symlink", "reflink", "hardlink", "copy", "archive"
    ] = _setting("auto", "How a snapshot is put in place.")
    wait_limit_s: float = _setting(
        1800.0, "Longest wait, in seconds, for another node.", minimum=0.0
    )
    store_timeout_s: float = _setting(
        4.0,
        "Seconds that all questions to the store may take together before the install runs "
        "plainly; also how long a fetch from it may bring too little.",
        minimum=0.0,
    )
    deadline_s: float = _setting(
        600.0,
        "Seconds that our own work may take, then the part is ended and falls back. The install "
        'command itself has no deadline; `wait = "always"` adds `wait_limit_s`.',
        minimum=0.1,
    )
    publish: Literal["background", "inline"] = _setting(
        "background", "Whether the job waits until a new snapshot is published."
    )
    sign_key: str = _setting("", "File with the key that snapshots are signed and checked with.")
    allow_setuid: bool = _setting(False, "Whether a restore keeps setuid and setgid bits.")
    max_age_days: float = _setting(
        7.0, "Age at which a snapshot of unpinned requirements is made again.", minimum=0.0
    )


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """`[checkpoint]`: what the job resumes from, and how it is brought to the node."""

    enabled: bool = _setting(True, "False: `load` runs plainly.")
    url: str = _setting(
        "",
        "The checkpoint: a striped one, or any plain file, as `bootseer stripe` takes it. Empty: "
        "this part has nothing to do, unless `load` is set.",
    )
    to: str = _setting(
        "",
        "Directory where the job finds it: a directory's files themselves, a single file by its "
        "name.",
    )
    load: tuple[str, ...] = _setting(
        (),
        "Command that brings the checkpoint to `to` without bootseer. Empty: on a fault of ours "
        "the job starts without it.",
        words=True,
    )
    form: Literal["auto", "mount", "copy"] = _setting(
        "auto", "Mounted and read on demand, or copied first; `auto`: mounted where that works."
    )
    allow_other: bool = _setting(False, "Whether other users of this machine may read the mount.")
    buffered: bool | None = _setting(
        None,
        "Whether the mount's reads of files of 4 MiB and more go through the page cache, as jobs "
        "that read twice want it. Unset: where something is fetched ahead (`prefetch`), because "
        "it comes fastest then.",
    )
    cache: str = _setting(
        "", "Directory of this node in which fetched bytes are kept for its next start."
    )
    prefetch: str = _setting(
        ".",
        "What a mount fetches while the job still imports: `.` for all of `url` if that is one "
        "checkpoint, a name below it, a pattern (`step-*`: the newest whole checkpoint of these "
        "names), `@FILE` for what a pointer file names (`@FILE:iter_{:07}`: put into that form), "
        "`!COMMAND` for what a line of a shell on this node prints. "
        "Empty: nothing. A guess that turns out wrong is dropped.",
    )
    memory_mib: int = _setting(
        512, "Memory in MiB that the mount, or the copy, may use for itself.", minimum=64
    )
    user: str = _setting("", "User name for a store without authentication.")
    auth: Literal["auto", "simple", "token", "kerberos"] = _setting(
        "auto", "How the store knows who we are."
    )
    token_file: str = _setting("", "File with a delegation or bearer token for the store.")
    ca_file: str = _setting("", "Certificates that a TLS store is checked against.")
    redirects: Literal["same-host", "outward", "any"] = _setting(
        "outward",
        "Where an http(s) store may redirect to; `outward`: to no more private an address.",
    )
    deadline_s: float = _setting(
        600.0,
        "Seconds that our own work may take before the job starts (for a mount: until it "
        "answers), then the part is ended and falls back. With `load`, a store that is silent "
        "costs no more than 5 s, or a tenth of what `load` took last time: four fifths of that "
        "for saying what the checkpoint is, all of it in the middle of a copy.",
        minimum=0.1,
    )


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`[image]`: the image's files that a start reads, read ahead during the job by their trace.

    Nothing waits for it and nothing depends on it; it needs no privilege."""

    enabled: bool = _setting(True, "False: nothing is read ahead and nothing recorded.")
    traces: str = _setting(
        "",
        "Directory shared by the nodes, or URL, where traces of starts are kept. Empty: this part "
        "has nothing to do.",
    )
    image: str = _setting(
        "",
        "The image's name there, best its digest. Empty: derived from its directories, the "
        "same on every node.",
    )
    workload: str = _setting(
        "", "Name of what runs, where several kinds of jobs share an image; each has its own trace."
    )
    paths: tuple[str, ...] = _setting(
        (), "Directories whose files count, without what is mounted below them. Empty: `/`."
    )
    record: Literal["auto", "always", "never"] = _setting(
        "auto",
        "Whether this start is recorded; `auto`: the first five, and whenever much has changed.",
    )
    window_s: float = _setting(
        120.0, "Seconds after which recording ends where no first step comes before.", minimum=1.0
    )
    share: float = _setting(
        0.25,
        "Least share of the recorded starts that must have read what is read ahead.",
        minimum=0.0,
    )
    limit_mib: int = _setting(
        0, "Most MiB to read ahead. 0: half of the memory that is free.", minimum=0
    )
    user: str = _setting("", "User name for a store without authentication.")
    auth: Literal["auto", "simple", "token", "kerberos"] = _setting(
        "auto", "How the store knows who we are."
    )
    token_file: str = _setting("", "File with a delegation or bearer token for the store.")
    ca_file: str = _setting("", "Certificates that a TLS store is checked against.")
    redirects: Literal["same-host", "outward", "any"] = _setting(
        "outward",
        "Where an http(s) store may redirect to; `outward`: to no more private an address.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings; one attribute a section."""

    job: JobSettings = field(default_factory=JobSettings)
    deps: DepsSettings = field(default_factory=DepsSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    image: ImageSettings = field(default_factory=ImageSettings)


Section = type[ImageSettings] | type[JobSettings] | type[DepsSettings] | type[CheckpointSettings]

SECTIONS: Mapping[str, Section] = types.MappingProxyType(
    {
        "job": JobSettings,
        "deps": DepsSettings,
        "checkpoint": CheckpointSettings,
        "image": ImageSettings,
    }
)

PLAIN_COMMANDS = ("deps.install", "checkpoint.load")
"""What a job needs even when the rest of its configuration is damaged."""
