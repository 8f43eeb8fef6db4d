"""What tests do with a real node: apply manifests, injected, and look at what became of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bootseer.kubernetes import inject, manifest_text
from bootseer.kubernetes.options import Options, Part, Place
from tests.support.labs.kubernetes import IMAGE, PYTHON


class Lab:
    """A namespace and a folder of one test."""

    def __init__(self, k8s: Any, namespace: str) -> None:
        self.k8s, self.namespace = k8s, namespace
        self.folder = Path(k8s.shared) / namespace
        self.events, self.store = self.folder / "events", self.folder / "store"
        for path in (self.folder, self.events, self.store):
            path.mkdir()
            path.chmod(0o777)

    def options(self, *parts: Part, **more: Any) -> Options:
        places: dict[str, Any] = {"events": Place("host", str(self.events))}
        places |= {"store": Place("host", str(self.store))} if "deps" in parts else {}
        return Options(image=IMAGE, parts=("events", *parts), **{**places, **more})

    def apply(self, manifest: Any, options: Options | None, edit: Any = None) -> None:
        """Apply a manifest, injected; `edit` changes the injected object before it goes in."""
        raw = json.dumps(manifest)
        if options is not None:
            result = inject.inject(manifest_text.decode(raw.encode(), "test"), options)
            assert not result.refusals
            raw = result.raw
        if edit is not None:
            document = json.loads(raw)
            edit(document)
            raw = json.dumps(document)
        self.k8s.kubectl("apply", "-n", self.namespace, "-f", "-", data=raw)

    def pod(self, name: str) -> Any:
        return self.k8s.get("pod", name, "-n", self.namespace)

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"].get("phase"))

    def ended(self, name: str) -> Any:
        """The job container's last state, once its pod has ended."""
        ends = ("Succeeded", "Failed")
        self.k8s.wait_for(lambda: self.phase(name) in ends, f"pod {name} to end")
        (status,) = self.pod(name)["status"]["containerStatuses"]
        return status["state"]["terminated"]

    def logs(self, name: str) -> str:
        return str(self.k8s.kubectl("logs", name, "-n", self.namespace, "-c", "main"))

    def lines(self) -> list[dict[str, Any]]:
        """All events of the folder."""
        texts = (path.read_text(encoding="utf-8") for path in self.events.rglob("*.jsonl"))
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def report(self) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "report", "--json", str(self.events)],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)


def pod(name: str, command: list[str], image: str = PYTHON, **more: Any) -> dict[str, Any]:
    main = {"name": "main", "image": image, "command": command, **more}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
