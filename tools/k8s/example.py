"""A real Job of two pods, and its report, which is kept as an example in the documentation.

    python -m tools.k8s.example [FILE]          default: docs/report-two-pods.txt

Starts a cluster of one node, applies the Job below through `bootseer inject`, imports what the
cluster recorded, and writes what `bootseer report` says. Needs root and Debian's packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.k8s.cluster import ROOT, Cluster
from tools.k8s.settings import REGISTRY

TARGET = ROOT / "docs/report-two-pods.txt"
IMAGE, BARE = f"{REGISTRY}/bootseer-init:1", f"{REGISTRY}/lab/bare:1"

SCRIPT = """\
b=/opt/bootseer/bin/bootseer
if mkdir /bootseer/events/taken; then data=2; else data=0.6; fi 2> /dev/null
span=$($b event begin data.prepare)
sleep $data
$b event end data.prepare --span $span
span=$($b event begin rendezvous --wait)
touch /bootseer/events/here-$HOSTNAME
while [ $(ls /bootseer/events | grep -c here-) -lt 2 ]; do sleep 0.05; done
$b event end rendezvous --span $span
sleep 0.4
$b event point first_step
sleep 0.2
"""


def job(image: str) -> str:
    """The Job's manifest, not injected."""
    main = {"name": "main", "image": image, "command": ["sh", "-c", SCRIPT]}
    template = {"spec": {"restartPolicy": "Never", "containers": [main]}}
    return json.dumps(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "train"},
            "spec": {"completions": 2, "parallelism": 2, "template": template},
        }
    )


def report(cluster: Cluster, namespace: str, events: Path) -> str:
    """Run the Job in a namespace; `events` is a folder that pods of the cluster can reach."""
    inject = ["inject", "-f", "-", "--image", IMAGE, "--events", f"host:{events}"]
    injected = _bootseer(*inject, "--parts", "events", data=job(BARE))
    cluster.kubectl("apply", "-n", namespace, "-f", "-", data=injected)

    def succeeded() -> bool:
        status = cluster.get("job", "train", "-n", namespace)["status"]
        return bool(status.get("succeeded") == 2)

    cluster.wait_for(succeeded, "both pods")
    records = cluster.kubectl("get", "pods,events,jobs", "-n", namespace, "-o", "json")
    _bootseer("import", "k8s", "--events", str(events), "-", data=records)
    return _bootseer("report", str(events))


def _bootseer(*words: str, data: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", *words],
        input=data,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bootseer {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    from tools.initimage.__main__ import build
    from tools.k8s import images

    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    with tempfile.TemporaryDirectory(prefix="bootseer-example-") as place:
        work = Path(place)
        held = {"bootseer-init:1": work / "init.tar", "lab/bare:1": work / "bare.tar"}
        build(held["bootseer-init:1"], IMAGE, level=1)
        images.bare_image(held["lab/bare:1"], work)
        with Cluster(work / "cluster", images=held) as cluster:
            events = cluster.shared / "events"
            events.mkdir()
            events.chmod(0o777)
            target.write_text(report(cluster, "default", events), encoding="utf-8")


if __name__ == "__main__":
    main()
