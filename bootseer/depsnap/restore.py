"""Restore an archive (stub: signatures stand, bodies follow)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from bootseer.depsnap.model import Digest, Limits, Recovery, RestoreResult


def restore(
    path: str,
    expected_digest: Digest,
    targets: Mapping[str, str] | None = None,
    *,
    limits: Limits | None = None,
    jobs: int | None = None,
    allow_setuid: bool = False,
    owners: Collection[tuple[int, int]] | None = None,
    on_step: Callable[[str], None] | None = None,
) -> RestoreResult:
    """Unpack into staging, verify everything, then switch in; all roots or none.

    `targets` maps recorded roots to where they shall stand now (default: where they were).
    `owners` are the (uid, gid) pairs that root may hand files to (pass `ArchiveInfo.owners` from
    the record); an unprivileged caller owns everything itself. `on_step` is for fault injection
    in tests alone. Raises CorruptDataError, NoSpaceError, AccessDeniedError, BusyError,
    NotSupportedError; the targets are then as they were.
    """
    raise NotImplementedError


def recover(target: str) -> Recovery:
    """Finish or undo what a killed restore left at `target`. Raises BusyError while one runs."""
    raise NotImplementedError
