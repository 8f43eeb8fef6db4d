"""The mount that containerd makes for a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.imageprefetch.snapshotter.types import Kind, Mount


def plan_mount(
    kind: Kind, upper: str, work: str, lowers: Sequence[str], *, index_off: bool
) -> Mount:
    """The mount of a snapshot; `lowers` are the parents' trees, nearest first.

    Overlayfs needs a lower directory, so a snapshot without parents is a bind mount of its own
    directory, and a view of a single tree a read-only bind mount of that.
    """
    if not lowers:
        return Mount("bind", upper, ("rw" if kind is Kind.ACTIVE else "ro", "rbind"))
    if kind is not Kind.ACTIVE and len(lowers) == 1:
        return Mount("bind", lowers[0], ("ro", "rbind"))
    options = ["index=off"] if index_off else []
    if kind is Kind.ACTIVE:
        options += [f"workdir={work}", f"upperdir={upper}"]
    options.append(f"lowerdir={':'.join(lowers)}")
    return Mount("overlay", "overlay", tuple(options))
