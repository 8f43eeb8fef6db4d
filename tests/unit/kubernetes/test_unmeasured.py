"""What runs containers and has no pod to inject is named; objects within objects are their own."""

from __future__ import annotations

import json

import pytest
import yaml

from bootseer.kubernetes import check, inject
from bootseer.kubernetes.options import LAUNCHER, Options
from tests.integration.kubernetes.test_commands import GOOD, bootseer
from tests.support.samples.manifests import done, pods_of, refusal, taken_out, text

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


PATCHED = """\
apiVersion: workloads.x-k8s.io/v1alpha2
kind: RoleBasedGroup
metadata: {name: serve}
spec:
  roleTemplates:
  - name: base
    template:
      spec:
        containers:
        - name: engine
          image: lmsysorg/sglang:v0.5.5
          command: [python3, -m, sglang.launch_server]
  roles:
  - name: decode
    standalonePattern:
      templateRef:
        name: base
        patch:
          spec:
            containers:
            - name: engine
              command: [python3, -m, sglang.launch_server, --tp, "8"]
"""


def test_what_is_merged_over_a_template_is_no_pod() -> None:
    """sgl-project/rbg, api/workloads/v1alpha2/helper.go: a strategic merge of the two."""
    result = inject.inject(text(PATCHED), Options())
    assert not result.refusals
    template, patch = pods_of(result.raw)
    assert template["containers"][0]["command"][0] == LAUNCHER
    assert patch == pods_of(PATCHED)[1]
    assert taken_out(result.raw) == PATCHED
    (left,) = result.unmeasured
    assert left.pod == "RoleBasedGroup/serve"
    assert left.reason.startswith("its patch at spec.roles[0].standalonePattern.templateRef.patch")
    command = '              command: [python3, -m, sglang.launch_server, --tp, "8"]\n'
    mere = PATCHED.replace(command, "              env: [{name: TP, value: '8'}]\n")
    assert not inject.inject(text(mere), Options()).unmeasured


@pytest.mark.parametrize("key", ["dispatch", "patchEncoder"])
def test_a_key_that_is_no_patch_may_have_the_word_in_it(key: str) -> None:
    raw = f"""\
apiVersion: example.com/v1
kind: Fleet
metadata: {{name: fleet}}
spec:
  {key}:
    template:
      spec: {{containers: [{{name: a, image: i, command: [x]}}]}}
"""
    result = inject.inject(text(raw), Options())
    assert (result.refusals, result.unmeasured) == ((), ())
    (pod,) = pods_of(result.raw)
    assert pod["containers"][0]["command"][0] == LAUNCHER


def test_an_older_state_that_the_cluster_keeps_is_left_alone() -> None:
    raw = """\
apiVersion: apps/v1
kind: ControllerRevision
metadata: {name: train-5d9}
data: {spec: {template: {spec: {containers: [{name: a, image: i, command: [x]}]}}}}
revision: 1
"""
    result = inject.inject(text(raw), Options())
    assert (result.raw, result.refusals, result.unmeasured) == (raw, (), ())


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


def test_a_job_whose_runtime_is_wrapped_beside_it_is_measured() -> None:
    result = inject.inject(text(f"{TRAIN}---\n{RUNTIME}"), Options())
    assert not result.unmeasured
    job, runtime = yaml.safe_load_all(result.raw)
    assert job == yaml.safe_load(TRAIN)
    assert pods_of(yaml.safe_dump(runtime))[0]["containers"][0]["command"][0] == LAUNCHER


def test_a_trainjob_in_a_list_is_wrapped() -> None:
    job = yaml.safe_load(TRAIN)
    job["spec"]["trainer"] = {"command": ["python", "t.py"]}
    raw = json.dumps({"kind": "List", "items": [job]}, indent=2)
    new = done(raw)
    (wrapped,) = yaml.safe_load(new)["items"]
    assert wrapped["spec"]["trainer"]["command"] == [LAUNCHER, "start", "--", "python", "t.py"]
    assert taken_out(new) == raw


MPI_IN_WRAPPER = """\
apiVersion: workload.codeflare.dev/v1beta2
kind: AppWrapper
metadata: {name: wrapped}
spec:
  components:
  - template:
      apiVersion: kubeflow.org/v2beta1
      kind: MPIJob
      metadata: {name: pi}
      spec:
        mpiReplicaSpecs:
          Worker:
            template:
              spec:
                containers:
                - name: worker
                  image: i
"""


def test_an_object_within_another_is_of_its_own_kind() -> None:
    reason = refusal(MPI_IN_WRAPPER)
    assert "given one by the MPI operator" in reason
    assert "--command 'MPIJob/pi/worker=" in reason
    new = done(f"{MPI_IN_WRAPPER}                  command: [sshd]\n")
    (pod,) = pods_of(new)
    fields = {one["name"]: one for one in pod["containers"][0]["env"]}
    path = fields["BOOTSEER_JOB_NAME"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['training.kubeflow.org/job-name']"


def test_an_object_that_is_used_twice_by_an_alias_is_not_lost() -> None:
    raw = """\
kind: AppWrapper
apiVersion: workload.codeflare.dev/v1beta2
spec:
  components:
  - template: &pod
      apiVersion: v1
      kind: Pod
      metadata: {name: p}
      spec: {containers: [{name: a, image: i, command: [x]}]}
  - generic: &job {apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {template: {spec:
      {containers: [{name: a, image: i, command: [x]}]}}}}
  - template: *pod
  - generic: *job
"""
    result = inject.inject(text(raw), Options())
    assert result.raw == raw
    titles = [refused.pod for refused in result.refusals]
    assert titles == ["AppWrapper/(unnamed) spec.components[0].template.spec", JOB_WITHIN]
    assert all("used at several places by an alias" in one.reason for one in result.refusals)


JOB_WITHIN = "Job/j spec.template.spec"


def test_a_template_that_bears_a_kind_stays_its_jobs() -> None:
    raw = """\
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  template:
    apiVersion: v1
    kind: Pod
    spec: {containers: [{name: a, image: i, command: [x]}]}
"""
    (pod,) = pods_of(done(raw))
    fields = {one["name"]: one for one in pod["containers"][0]["env"]}
    path = fields["BOOTSEER_JOB_UID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['controller-uid']"


@pytest.mark.parametrize(
    "raw",
    [
        "jobs:\n  test:\n    container: {image: nvcr.io/x}\n",
        "apiVersion: auto.gke.io/v1\nkind: Allowlist\nmatching: {containers: [{image: i}]}\n",
        "apiVersion: example.com/v1\nkind: Other\nspec: {replicas: 2}\n",
    ],
)
def test_what_runs_no_containers_of_a_cluster_is_not_named(raw: str) -> None:
    result = inject.inject(text(raw), Options())
    assert not result.unmeasured
