"""Of which revision a figure is, and whether the code that it measures has changed since.

A benchmark names what it measures: `MEASURES` of its module, paths below the root of the tree
or git's patterns of them, its own files among them. Documents do not age a figure, so Markdown
files count nowhere.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from bench.names import module_of

ROOT = Path(__file__).parent.parent
UNKNOWN = "unknown"
DIRTY = "-dirty"
EVERYTHING = ("bootseer", "bench")
NOT_MEASURED = (":(exclude)*.md", ":(exclude)bench/results")


def measured_paths(name: str) -> tuple[str, ...]:
    """What a benchmark measures; all of our code where it does not say."""
    try:
        module = module_of(name)
    except ModuleNotFoundError:
        return EVERYTHING
    return tuple(getattr(module, "MEASURES", EVERYTHING))


@functools.cache
def current(name: str) -> str:
    """The revision of the tree, as it was when this process first asked.

    `-dirty` follows where the measured code differs from that revision, or is not in it.
    """
    head = _git("rev-parse", "HEAD")
    if head is None:
        return UNKNOWN
    changed = _git("status", "--porcelain", "--", *measured_paths(name), *NOT_MEASURED)
    return head.strip() + (DIRTY if changed != "" else "")


@functools.cache
def is_stale(name: str, revision: str) -> bool:
    """Whether the measured code differs from that of a revision, or the revision is not known."""
    if revision.endswith(DIRTY) or not revision or revision == UNKNOWN:
        return True
    return _git("diff", "--quiet", revision, "--", *measured_paths(name), *NOT_MEASURED) is None


def _git(*words: str) -> str | None:
    """What git answers; None where it fails, or is not there, or this is no repository."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
