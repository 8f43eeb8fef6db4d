"""Small wheels made on the spot, so that tests install really and need no network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

MODULE = "VERSION = {version!r}\n\n\ndef main():\n    print({name!r}, VERSION)\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """A pure wheel of one module and one console script, written by hand."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": MODULE.format(name=name, version=version),
        f"{name}/data.txt": f"{name} {version}\n" * 200,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
