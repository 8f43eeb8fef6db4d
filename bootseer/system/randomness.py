"""Chance for waits and choices; `random` takes a millisecond to import: only who uses it does."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Programs that seed `random` get their own numbers undisturbed, and forks do not share ours."""
