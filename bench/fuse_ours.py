"""A directory served by our server: `python -m bench.fuse_ours DIRECTORY MODE MOUNTPOINT`.

MODE is `buffered`, `direct` or `passthrough`. Runs in the foreground until unmounted.
"""

from __future__ import annotations

import sys

from bootseer.fuse.localtree import LocalTree
from bootseer.fuse.options import MountOptions
from bootseer.fuse.serve import Mount


def main() -> None:
    directory, mode, mountpoint = sys.argv[1:]
    passes = mode == "passthrough"
    options = MountOptions(
        allow_other=True, passthrough=passes, on_fault=lambda text: print(text, flush=True)
    )
    with LocalTree(directory, direct=mode == "direct", passthrough=passes) as tree:
        Mount(tree, mountpoint, options=options).run()


if __name__ == "__main__":
    main()
