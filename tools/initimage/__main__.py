"""Build the init container's image.

    python -m tools.initimage [--name HOST/REPOSITORY:TAG] [--output FILE]

Prints the image's digest, its size in a registry, and that of the interpreter in it. Load it by
`ctr image import FILE`, `podman load -i FILE` or `skopeo copy oci-archive:FILE docker://NAME`.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import os
import sys
import tempfile
from pathlib import Path

import bootseer
from bootseer.errors import BootseerError
from tools.initimage import ociimage, payload

DEFAULT_NAME = f"bootseer-init:{bootseer.__version__}"


def build(
    target: Path, name: str, cache: Path | None = None, *, level: int = ociimage.GZIP_LEVEL
) -> tuple[ociimage.Written, int]:
    """Write the image; returns it, and the compressed bytes that the interpreter is of it.

    With another `level` of gzip than the default the image's digest is another one.
    """
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock, tempfile.TemporaryDirectory() as tmp:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = Path(tmp) / "root"
        payload.build(root, cache)
        run_as = ociimage.RunAs(
            entrypoint=["/payload/bin/busybox", "sh", "/payload/install.sh"],
            command=["install", "/opt/bootseer"],
            labels={"org.opencontainers.image.version": bootseer.__version__},
        )
        written = ociimage.write(target, root, name, run_as, level=level)
        return written, _interpreter_bytes(root, level)


def _interpreter_bytes(root: Path, level: int) -> int:
    """The interpreter's share, measured by compressing it alone."""
    python = root / "payload/python"
    (python / "lib/python3").rename(root / "wrapper")
    return len(gzip.compress(ociimage.layer(python), level, mtime=0))


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
        written, interpreter = build(options.output, options.name)
    except BootseerError as error:
        print(f"bootseer: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.output}: {options.name}@{written.digest}")
    own = written.size_bytes - interpreter
    print(f"{written.size_bytes} bytes in a registry, {own} without the interpreter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
