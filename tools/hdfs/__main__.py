"""Start a real HDFS for a person to try things on; Ctrl-C stops it and removes its files.

python -m tools.hdfs [--datanodes N] [--replication N] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from types import FrameType

from tools.hdfs.cluster import Cluster
from tools.hdfs.shared import running


def main() -> int:
    """Run from the command line; URLs go to standard output, the rest to standard error."""
    parser = argparse.ArgumentParser(prog="python -m tools.hdfs", description=__doc__)
    parser.add_argument("--datanodes", type=int, default=3)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    print("starting HDFS (the first time fetches 220 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bootseer-hdfs-") as folder:
        options = {"datanodes": chosen.datanodes, "replication": chosen.replication}
        with Cluster(folder, **options) as cluster:
            _tell(cluster, as_json=chosen.json)
            try:
                signal.pause()
            except KeyboardInterrupt:
                print("stopping", file=sys.stderr)
    return 0


def _tell(cluster: Cluster, *, as_json: bool) -> None:
    found = running(cluster)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)), flush=True)
        return
    print(found.webhdfs_url)
    print(found.hdfs_url)
    print(f"HADOOP_CONF_DIR={found.conf}", flush=True)
    print("Ctrl-C stops it", file=sys.stderr)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
