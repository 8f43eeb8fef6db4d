"""Tar archives that we made ourselves, or whose sender is trusted."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any


def extract_all(packed: tarfile.TarFile, folder: str | Path) -> None:
    """Extract everything as it is stored, owners and modes included where root asks.

    Python 3.11.4 brought filters, and 3.14 uses one that is not named; Debian's 3.11.2 has none.
    """
    filters: dict[str, Any] = {}
    if hasattr(tarfile, "fully_trusted_filter"):
        filters["filter"] = "fully_trusted"
    packed.extractall(folder, **filters)
