"""Manifests, and what tests of injection do with them."""

from __future__ import annotations

import json
from typing import Any

import yaml

from bootseer.kubernetes import inject, manifest_text, uninject
from bootseer.kubernetes.options import Options

TRAIN = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llama}
spec:
  runtimeRef: {name: torch}
  podTemplateOverrides:
  - targetJobs: [{name: node}]
    spec:
      containers:
      - name: node
        env: [{name: A, value: b}]
  runtimePatches:
  - manager: me
    trainingRuntimeSpec:
      template:
        spec:
          replicatedJobs:
          - name: node
            template:
              spec:
                template:
                  spec:
                    containers: [{name: node, command: [x]}]
"""
RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: torch}
spec:
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          spec:
            template:
              spec:
                containers:
                - name: node
                  image: python:3.12
                  command: [torchrun]
"""

JOB = """\
# a job
apiVersion: batch/v1
kind: Job
metadata: {name: train}   # its name
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: main   # the job
        image: python:3.11
        # what runs
        command:
        - python
        - train.py
        volumeMounts: [{name: data, mountPath: /data}]
        env:
          - name: A
            value: "1"
      volumes:
      - name: data
        emptyDir: {}
"""

POD_FLOW = '{"kind": "Pod", "spec": {"containers": [{"name": "a", "command": ["x"]}]}}'
POD_PRETTY = json.dumps(json.loads(POD_FLOW), indent=4)
POD_JACKSON = POD_PRETTY.replace('":', '" :')
POD_DASH = "kind: Pod\nspec:\n  containers:\n  - image: i\n    name: a\n    command: [\"x\", 'y z']"
POD_WINDOWS = JOB.replace("\n", "\r\n")
POD_EMPTY_KEYS = (
    "kind: Pod\nspec:\n    containers:\n      - name: a\n        command: [x]\n        env:\n"
    "    volumes:\n"
)
TWO = f"{JOB}---\n# nothing\n---\n{POD_DASH}\n"
LIST = json.dumps({"kind": "List", "items": [json.loads(POD_FLOW)] * 2})

SAMPLES = [
    JOB,
    POD_FLOW,
    POD_PRETTY,
    POD_JACKSON,
    POD_DASH,
    POD_WINDOWS,
    POD_EMPTY_KEYS,
    TWO,
    LIST,
]


def text(raw: str) -> manifest_text.Text:
    return manifest_text.decode(raw.encode(), "job.yaml")


def done(raw: str, options: Options | None = None, **more: Any) -> str:
    """Inject, with no pod refused."""
    result = inject.inject(text(raw), options or Options(**more))
    assert not result.refusals
    return result.raw


def taken_out(raw: str) -> str:
    return uninject.uninject(text(raw))


def refusal(raw: str, options: Options | None = None, resolve: Any = None) -> str:
    """The reason for which the only pod is refused; its text is as it was then."""
    result = inject.inject(text(raw), options or Options(), resolve)
    assert result.raw == raw
    (found,) = result.refusals
    return found.reason


def pods_of(raw: str) -> list[dict[str, Any]]:
    """All pod specs of the manifests, as a cluster would read them."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("containers"), list):
                found.append(node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    for document in yaml.load_all(raw, Loader=yaml.CSafeLoader):  # the other one refuses tabs
        walk(document)
    return found


_POD = """\
kind: Pod
metadata: {{name: {name}}}
spec:
  containers:
  - name: main
    image: x
    command: [train]
    {more}
"""


def pod_of(name: str = "p", more: str = "") -> str:
    """A pod, and what else its container has."""
    return _POD.format(name=name, more=more)
