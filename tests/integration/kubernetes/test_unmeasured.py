"""What runs containers and has no pod to inject, as the commands tell it."""

from __future__ import annotations

import json

import pytest

from bootseer.kubernetes import check, inject
from bootseer.kubernetes.options import Options
from tests.integration.kubernetes.test_commands import GOOD, bootseer
from tests.support.samples.manifests import RUNTIME, TRAIN, text

KNATIVE = """\
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec:
  template:
    spec:
      containers:
      - image: ghcr.io/knative/helloworld-go
        name: main
        command: [x]
"""

LLM = """\
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: qwen}
spec:
  model: {uri: hf://Qwen/Qwen2.5-7B}
  template:
    containers:
    - name: main
      image: vllm/vllm-openai
"""

TASK = """\
apiVersion: tekton.dev/v1
kind: Task
metadata: {name: build}
spec:
  steps:
  - name: build
    image: golang
"""

REFERENCE = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: run-}
spec:
  workflowTemplateRef: {name: train}
"""

SIDECARS = """\
apiVersion: apps.kruise.io/v1beta1
kind: SidecarSet
metadata: {name: logs}
spec:
  selector: {matchLabels: {app: train}}
  containers:
  - name: shipper
    image: fluent/fluent-bit:3.1
    command: [fluent-bit, -c, /etc/fb.conf]
    podInjectPolicy: BeforeAppContainer
"""

GRAPH = """apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: decode}
spec:
  services:
    Worker:
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.0
          command: [python3, -m, dynamo.vllm]
"""


@pytest.mark.parametrize(
    ("raw", "title", "reason"),
    [
        (SIDECARS, "SidecarSet/logs", "containers at spec.containers, but no pod's template"),
        (GRAPH, "DynamoGraphDeployment/decode", "extraPodSpec.mainContainer, but no pod's"),
        (KNATIVE, "Service/hello", "podspec-init-containers"),
        (LLM, "LLMInferenceService/qwen", "presets"),
        (TASK, "Task/build", "containers at spec.steps, but no pod's template, and the kind Task"),
        (REFERENCE, "Workflow/run-", "its templates are those of train; inject that one"),
        (TRAIN, "TrainJob/llama", "it has no command: what its runtime torch starts"),
        (TRAIN + f"---\n{RUNTIME.replace('command', 'x')}", "TrainJob/llama", "no command"),
    ],
)
def test_what_stays_unmeasured_is_named(raw: str, title: str, reason: str) -> None:
    result = inject.inject(text(raw), Options(), None)
    assert not result.refusals
    (left,) = result.unmeasured
    assert left.pod == title
    assert reason in left.reason
    assert result.raw.startswith(raw.partition("---")[0])
    done = bootseer("inject", "-f", "-", "--offline", data=raw.encode())
    assert done.returncode == 0
    assert f"{title}: left as it is: " in done.stderr.decode()
    done = bootseer("inject", "-f", "-", "--offline", "--require", data=raw.encode())
    assert (done.returncode, done.stdout) == (7, b"")
    assert b"not everything in it that runs containers is injected" in done.stderr
    found = check.check(text(raw), Options())[-1]
    assert (found.pod, found.refusal, found.passed_over) == (title, "", left.reason)
    words = ("inject", "-f", "-", "--explain", "--json", "--require")
    done = bootseer(*words, data=raw.encode())
    assert done.returncode == 7
    assert json.loads(done.stdout)["unmeasured"][0]["pod"] == title


def test_require_is_met_where_everything_is_injected() -> None:
    done = bootseer("inject", "-f", "-", "--require", data=GOOD.encode())
    assert (done.returncode, done.stderr) == (0, b"")
    raw = b"kind: ConfigMap\ndata: {a: b}\n---\nkind: Service\nspec: {}\n"
    done = bootseer("inject", "-f", "-", "--require", data=raw)
    assert (done.returncode, done.stdout) == (7, b"")
    assert b"its objects are of kind ConfigMap, Service" in done.stderr
    done = bootseer("inject", "-f", "-", data=raw)
    assert (done.returncode, done.stdout) == (0, raw)
    assert b"there is no pod in it; its objects are of kind ConfigMap, Service" in done.stderr
