"""The inputs of the job that bootseer may make ready; each adds itself to the demonstration.

A stage prepares its side once, contributes settings to the candidate's `bootseer.toml`, and says
for the report whether it was used, and what about it is emulated. A new part of bootseer becomes
one more class here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from bootseer.profiler.report.model import PartUse
from tools.demo.lab import Lab
from tools.demo.starts import Start
from tools.machine import contents, differences, fingerprint, without_write_bits


class Stage(Protocol):
    """One input: deps or checkpoint."""

    @property
    def name(self) -> str:
        """Its name among the report's parts."""

    def settings(self, lab: Lab) -> str:
        """Its section of `bootseer.toml`, or nothing."""

    def faults(self, lab: Lab, start: Start) -> list[str]:
        """Why this start, still in place, was not what it should be."""

    def use(self, starts: Sequence[Start]) -> PartUse:
        """What the candidate's starts made of it."""

    def emulated(self) -> list[str]:
        """What about it is emulated, for the report."""


class Deps:
    """Dependencies: installed plainly by the baseline, restored by the candidate."""

    name = "deps"

    def __init__(self) -> None:
        self._plain: dict[str, tuple[object, ...]] | None = None
        self._recorded: dict[str, tuple[object, ...]] | None = None

    def settings(self, lab: Lab) -> str:
        values = {
            "install": lab.install,
            "key_files": [str(lab.requirements)],
            "store": str(lab.store),
            "cache": str(lab.cache),
        }
        return "[deps]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())

    def faults(self, lab: Lab, start: Start) -> list[str]:
        found = fingerprint(lab.venv)
        if self._plain is None and start.kind == "plain":
            self._plain = found
        if start.kind == "record":
            self._recorded = found
        ends = start.ends("deps.install")
        # An unprivileged user's shared files are read-only, and a hard link shares its mode.
        linked = any("hardlink" in str(end.get("bootseer.deps.form")) for end in ends)
        alike = without_write_bits if linked else _as_it_is
        out = []
        if self._plain is not None:
            plain = contents(self._plain)
            out += _differ(alike(plain), alike(contents(found)), "a plain install")
        if start.restores and self._recorded is not None:
            out += _differ(alike(self._recorded), alike(found), "the install that was recorded")
        results = [end.get("bootseer.deps.result") for end in ends]
        if start.restores and results != ["restored"]:
            out.append(f"dependencies were not restored but {results}")
        return out

    def use(self, starts: Sequence[Start]) -> PartUse:
        ends = [end for start in starts for end in start.ends("deps.install")]
        restored = [end for end in ends if end.get("bootseer.deps.result") == "restored"]
        if not starts or len(restored) < len(starts):
            return PartUse(False, f"restored in {len(restored)} of {len(starts)} starts only")
        forms = {str(end.get("bootseer.deps.form")) for end in restored}
        return PartUse(True, f"restored from a snapshot ({', '.join(sorted(forms))})")

    def emulated(self) -> list[str]:
        return [
            "package index: a local directory of wheels, without a network",
            "shared store: a local directory",
        ]


class Checkpoint:
    """The checkpoint: read plainly by the baseline, through the striped mount by the candidate."""

    name = "checkpoint"

    def __init__(self) -> None:
        self._emulated: list[str] = []

    def settings(self, lab: Lab) -> str:
        self._emulated = lab.place.emulated()
        values = {"url": lab.place.url, "to": str(lab.mounted)}
        return "[checkpoint]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())

    def faults(self, lab: Lab, start: Start) -> list[str]:
        forms = self._forms(start)
        if start.kind == "plain":
            return [f"the plain side used {forms}"] if forms else []
        return [] if forms in (["mount"], ["copy"]) else [f"the checkpoint came by {forms}"]

    def _forms(self, start: Start) -> list[str]:
        ends = start.ends("checkpoint.load")
        return [str(end["bootseer.form"]) for end in ends if "bootseer.form" in end]

    def use(self, starts: Sequence[Start]) -> PartUse:
        forms = sorted({form for start in starts for form in self._forms(start)})
        if not starts or any(not self._forms(start) for start in starts):
            return PartUse(False, "not in every start")
        return PartUse(True, f"striped, {' and '.join(forms)}")

    def emulated(self) -> list[str]:
        return self._emulated


def all_stages() -> tuple[Stage, ...]:
    """Every stage, in the report's order."""
    return (
        Deps(),
        Checkpoint(),
    )


def _as_it_is(entries: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    return entries


def _differ(
    wanted: dict[str, tuple[object, ...]], found: dict[str, tuple[object, ...]], what: str
) -> list[str]:
    paths = differences(wanted, found)
    shown = ", ".join(paths[:3])
    return [f"{len(paths)} entries differ from {what}: {shown}"] if paths else []
