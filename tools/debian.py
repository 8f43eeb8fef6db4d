"""This Debian, as its own files and apt's settings tell of it."""

from __future__ import annotations

import platform
import subprocess


def release() -> str:
    """The code name of this release. Raises RuntimeError where this is no Debian."""
    about = platform.freedesktop_os_release()
    if about.get("ID") != "debian" or not about.get("VERSION_CODENAME"):
        raise RuntimeError(f"this needs a Debian release, and this is {about.get('PRETTY_NAME')}")
    return about["VERSION_CODENAME"]


def mirror() -> str:
    """The URL that apt brings this release's packages from.

    Raises RuntimeError where apt's sources name none.
    """
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(SITE)"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wanted = [release(), "main"]
    for line in listed.stdout.splitlines():
        words = line.split()
        if words[:2] == wanted and len(words) == 3:
            return words[2]
    raise RuntimeError(f"apt's sources do not name {' '.join(wanted)}; see sources.list(5)")
