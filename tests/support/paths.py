"""Where things of this repository are, for tests in whatever folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "support" / "data"
"""Logs, manifests and lists that tests read."""
