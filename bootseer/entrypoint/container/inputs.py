"""What a container's job needs besides its image, brought while the image is mounted.

Each input is made ready on the node and shown to the container, which needs no privilege and no
part of bootseer for that. Where that fails, the input's plain command runs in the container before
the job, as it would without us.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Collection, Sequence

from bootseer.config.loading import Loaded, Problem
from bootseer.config.sections import CheckpointSettings
from bootseer.entrypoint.parts.checkpoint_part import CheckpointPart
from bootseer.entrypoint.plan import PartPlan
from bootseer.light_dataclasses import dataclass, replace

NOT_BY_COPY = (
    'form = "copy" is for `bootseer start` within a container; here the checkpoint is mounted'
)


@dataclass(frozen=True, slots=True)
class InputsPlan:
    """What is to be done before a container's job, decided from the settings alone.

    `checkpoint` is mounted at a directory of the node and shown at `checkpoint_to`; None where that
    is not tried. `plain` are the commands that run in the container whatever becomes of us, each
    with the reason ("" where the settings ask for it).
    """

    checkpoint: PartPlan | None = None
    checkpoint_to: str = ""
    checkpoint_load: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    layered: bool = False
    install_reason: str = ""
    plain: tuple[tuple[tuple[str, ...], str], ...] = ()
    problems: tuple[Problem, ...] = ()


def plan_inputs(loaded: Loaded, directory: str, taken: Collection[str] = ()) -> InputsPlan:
    """Plan a container's inputs; a checkpoint is to be mounted at `directory` of the node.

    `taken` are the places in the container where podman's options mount something.
    """
    config, plain = loaded.config, list[tuple[tuple[str, ...], str]]()
    deps_problem = _find_problem(loaded, "deps")
    given = config.checkpoint
    on_node, load = _move_to(given, directory)
    problem = _find_problem(loaded, "checkpoint")
    if not problem and given.enabled and given.url and given.form == "copy":
        problem = NOT_BY_COPY
    if not problem and given.enabled and given.url:
        problem = _find_fault_of_place(given.to, taken)
    part = CheckpointPart().plan(replace(config, checkpoint=on_node), problem)
    if part is not None and part.request is None:
        if load:
            plain.append((load, part.reason))
        part = None if load or not part.reason else part
    return InputsPlan(
        checkpoint=None if part is None else replace(part, plain=()),
        checkpoint_to=config.checkpoint.to,
        checkpoint_load=load,
        install=config.deps.install,
        layered=config.deps.enabled and not deps_problem,
        install_reason=deps_problem,
        plain=tuple(plain),
        problems=loaded.problems,
    )


def plan_plainly(loaded: Loaded, reason: str) -> InputsPlan:
    """All by plain commands, for a `reason`."""
    config = loaded.config
    plain = ((config.checkpoint.load, reason),) if config.checkpoint.load else ()
    return InputsPlan(install=config.deps.install, install_reason=reason, plain=plain)


def _find_fault_of_place(to: str, taken: Collection[str]) -> str:
    """Why podman could not show a checkpoint at a place; "" where it can."""
    if to and (not to.startswith("/") or ":" in to):
        return f"to = {to!r} is no path in a container: begin it with / and leave : out"
    if posixpath.normpath(to or "/") in map(posixpath.normpath, filter(None, taken)):
        return f"podman's options mount something at {to} already"
    return ""


def _find_problem(loaded: Loaded, section: str) -> str:
    return next((p.message for p in loaded.problems if p.section in ("", section)), "")


def _move_to(
    checkpoint: CheckpointSettings, directory: str
) -> tuple[CheckpointSettings, tuple[str, ...]]:
    """The settings for a mount on the node that any user of the container may read."""
    to = directory if checkpoint.to else ""
    return replace(checkpoint, to=to, allow_other=True, form="mount"), checkpoint.load


def join_commands(commands: Sequence[Sequence[str]]) -> str:
    """Commands as one line of a shell, each run if those before it succeeded."""
    return " && ".join(shlex.join(command) for command in commands)
