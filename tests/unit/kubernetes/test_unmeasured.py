"""What runs containers and has no pod to inject is named; objects within objects are their own."""

from __future__ import annotations

import json

import pytest
import yaml

from bootseer.kubernetes import inject
from bootseer.kubernetes.options import LAUNCHER, Options
from tests.support.samples.manifests import RUNTIME, TRAIN, done, pods_of, refusal, taken_out, text

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
