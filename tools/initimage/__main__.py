"""Build the init container's image.

    python -m tools.initimage [--name HOST/REPOSITORY:TAG] [--output FILE]

Prints the image's digest, its size in a registry, and that of the interpreter in it. Load it by
`ctr image import FILE`, `podman load -i FILE` or `skopeo copy oci-archive:FILE docker://NAME`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bootseer
from bootseer.errors import BootseerError
from tools.initimage import ociimage, payload

DEFAULT_NAME = f"bootseer-init:{bootseer.__version__}"


def build(
    target: Path,
    name: str,
    cache: Path | None = None,
    *,
    level: int = ociimage.GZIP_LEVEL,
    sources: Path = payload.ROOT / "bootseer",
) -> ociimage.Written:
    """Write the image; with another `level` of gzip its digest is another one."""
    with _locked(cache) as folder, tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp) / "root"
        payload.build(root, folder, sources)
        run_as = ociimage.RunAs(
            entrypoint=["/payload/bin/busybox", "sh", "/payload/install.sh"],
            command=["install", "/opt/bootseer"],
            labels={"org.opencontainers.image.version": bootseer.__version__},
        )
        return ociimage.write(target, root, name, run_as, level=level)


def interpreter_bytes(cache: Path | None = None, *, level: int = ociimage.GZIP_LEVEL) -> int:
    """The compressed bytes that the interpreter is of the image, measured by packing it alone."""
    with _locked(cache) as folder, tempfile.TemporaryDirectory() as tmp:
        python = Path(tmp) / "python"
        shutil.copytree(payload.base(folder), python, symlinks=True)
        shutil.rmtree(python / payload.SITE)
        return len(gzip.compress(ociimage.layer(python), level, mtime=0))


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[Path]:
    """The folder of downloads, for one build at a time."""
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def default_cache() -> Path:
    """Where downloads are kept between builds."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "bootseer/init-image"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the init container's image.")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--output", type=Path, default=Path("bootseer-init.tar"))
    options = parser.parse_args()
    try:
        written = build(options.output, options.name)
        interpreter = interpreter_bytes()
    except BootseerError as error:
        print(f"bootseer: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.output}: {options.name}@{written.digest}")
    own = written.size_bytes - interpreter
    print(f"{written.size_bytes} bytes in a registry, {own} without the interpreter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
