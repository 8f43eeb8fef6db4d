"""Injection into kinds whose operators read or replace what a pod's command is."""

from __future__ import annotations

import pytest

from bootseer.kubernetes import check, inject
from bootseer.kubernetes.options import LAUNCHER, Options
from bootseer.storage.oci.config import ImageConfig
from tests.support.samples.manifests import done, pods_of, refusal, taken_out, text

MPI = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: pi
spec:
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - image: mpioperator/mpi-pi:openmpi
            name: mpi-launcher
            command: [mpirun, -n, "2", /home/mpiuser/pi]
    Worker:
      replicas: 2
      template:
        spec:
          containers:
          - image: mpioperator/mpi-pi:openmpi
            name: mpi-worker
            resources: {limits: {cpu: 1}}
"""
RAY = """\
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: raycluster
  annotations: {}
spec:
  headGroupSpec:
    rayStartParams: {}
    template:
      spec:
        containers:
        - name: ray-head
          image: rayproject/ray:2.46.0
          command: [echo, hello]
        - name: sidecar
          image: busybox
          command: [sleep, inf]
"""
RAY_JOB = """\
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: rayjob}
spec:
  entrypoint: python sample.py
  submitterPodTemplate:
    spec:
      containers:
      - name: submitter
        image: rayproject/ray:2.46.0
"""
TUNE = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune}
spec:
  runtimeRef: {name: torchtune-llama3.2-1b}
  trainer:
    command:
    - tune
    - run
"""
TUNE_RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torchtune-llama3.2-1b}
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
                  image: ghcr.io/kubeflow/trainer/torchtune-trainer
                  command: [tune, run, dataset.source=parquet]
"""
SERVING = """\
apiVersion: serving.kserve.io/v1alpha1
kind: ClusterServingRuntime
metadata: {name: kserve-huggingfaceserver}
spec:
  containers:
  - name: kserve-container
    image: kserve/huggingfaceserver:latest
    command: [python, -m, huggingfaceserver]
"""
CONFIG = ImageConfig((), ("/bin/bash",))


def test_a_worker_of_mpi_keeps_the_command_that_its_operator_gives_it() -> None:
    result = inject.inject(text(MPI), Options(), lambda _: CONFIG)
    (found,) = result.refusals
    assert found.pod == "MPIJob/pi spec.mpiReplicaSpecs.Worker.template.spec"
    assert "--command 'MPIJob/pi/mpi-worker=/usr/sbin/sshd -De'" in found.reason
    launcher, worker = pods_of(result.raw)
    assert launcher["containers"][0]["command"][:4] == [LAUNCHER, "start", "--", "mpirun"]
    assert "command" not in worker["containers"][0]
    assert "initContainers" not in worker
    # A command for all is none for them.
    assert inject.inject(text(MPI), Options(command=("x",))).refusals == result.refusals


def test_a_worker_of_mpi_with_arguments_alone_is_its_images() -> None:
    """The operator fills in sshd only where command and args are both empty."""
    raw = MPI.replace("            resources", "            args: [-De]\n            resources")
    result = inject.inject(text(raw), Options(), lambda _: ImageConfig(("/usr/sbin/sshd",), ()))
    assert result.refusals == ()
    worker = pods_of(result.raw)[1]["containers"][0]
    assert worker["command"] == [LAUNCHER, "start", "--", "/usr/sbin/sshd"]
    assert worker["args"] == ["-De"]


def test_a_worker_of_mpi_with_a_command_of_its_own_is_injected() -> None:
    sshd = ["/usr/sbin/sshd", "-De"]
    given = done(MPI, commands={"MPIJob/pi/mpi-worker": tuple(sshd)})
    written = done(
        MPI.replace("            resources", f"            command: {sshd}\n            resources")
    )
    for new in (given, written):
        worker = pods_of(new)[1]["containers"][0]
        assert worker["command"] == [LAUNCHER, "start", "--", *sshd]
    assert taken_out(given) == MPI


def test_what_kuberay_would_run_before_its_own_start_is_not_wrapped() -> None:
    options = Options(container="ray-head")
    assert "runs the command before a `ray start` of its own" in refusal(RAY, options)
    note = 'annotations: {ray.io/overwrite-container-cmd: "true"}'
    on_object = RAY.replace("annotations: {}", note)
    on_pod = RAY.replace("template:\n", f"template:\n      metadata: {{{note}}}\n")
    for raw in (on_object, on_pod):
        new = done(raw, options)
        assert pods_of(new)[0]["containers"][0]["command"][3:] == ["echo", "hello"]
        assert taken_out(new) == raw
    # Only the first container is Ray's.
    new = done(RAY, container="sidecar")
    assert pods_of(new)[0]["containers"][1]["command"][3:] == ["sleep", "inf"]


@pytest.mark.parametrize("place", ["headGroupSpec:\n       ", "workerGroupSpecs:\n      -"])
def test_what_makes_clusters_of_ray_is_refused_as_they_are(place: str) -> None:
    """vllm-project/aibrix: a RayClusterFleet holds a RayCluster's spec, which KubeRay starts."""
    raw = f"""\
apiVersion: orchestration.aibrix.ai/v1alpha1
kind: RayClusterFleet
metadata: {{name: fleet}}
spec:
  template:
    spec:
      {place} template:
          metadata: {{}}
          spec: {{containers: [{{name: ray, image: i, command: [vllm, serve]}}]}}
"""
    assert "runs the command before a `ray start` of its own" in refusal(raw)
    note = '{annotations: {ray.io/overwrite-container-cmd: "true"}}'
    assert pods_of(done(raw.replace("metadata: {}", f"metadata: {note}")))


def test_a_submitter_of_ray_keeps_the_command_that_its_operator_gives_it() -> None:
    assert "(ray job submit)" in refusal(RAY_JOB, None, lambda _: CONFIG)
    raw = f"{RAY_JOB}        command: [ray, job, submit]\n"
    assert pods_of(done(raw))[0]["containers"][0]["command"][3:] == ["ray", "job", "submit"]


@pytest.mark.parametrize("raw", [TUNE, TUNE_RUNTIME])
def test_torchtunes_command_stays_as_trainer_knows_it(raw: str) -> None:
    assert "adds torchtune's arguments only where the command is" in refusal(raw)
    (found,) = check.check(text(raw), Options())
    assert "torchtune" in found.refusal


def test_a_whole_command_of_torchtune_is_wrapped() -> None:
    raw = f"{TUNE}    - full_finetune_distributed\n"
    assert taken_out(done(raw)) == raw != done(raw)


@pytest.mark.parametrize("kind", ["ClusterServingRuntime", "ServingRuntime"])
def test_a_runtime_without_init_containers_is_refused(kind: str) -> None:
    assert "no init containers" in refusal(SERVING.replace("ClusterServingRuntime", kind))


@pytest.mark.parametrize(
    ("version", "kind", "known"),
    [
        ("batch/v1", "Job", True),
        ("batch.volcano.sh/v1alpha1", "Job", True),
        ("example.com/v1", "Job", False),
        ("v1", "Pod", True),
        ("example.com/v1", "MPIJob", False),
    ],
)
def test_an_unknown_kind_is_injected_and_said_to_be_unknown(
    version: str, kind: str, known: bool
) -> None:
    raw = (
        f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: x}}\nspec:\n  mpiReplicaSpecs:\n"
        "    Worker: {template: {spec: {containers: [{name: a, image: i, command: [x]}]}}}\n"
    )
    (found,) = check.check(text(raw), Options())
    assert found.refusal == ""
    assert any(f"the kind {kind} ({version}) is unknown" in n for n in found.notes) is not known
