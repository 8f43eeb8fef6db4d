"""Random numbers for waits and choices; `random`, slow to import, is imported on first use."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Programs that seed `random` get their own numbers undisturbed, and forks do not share ours."""
