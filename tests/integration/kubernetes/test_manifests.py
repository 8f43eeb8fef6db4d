"""The manifests of `k8s/`: valid for several versions, buildable, equal to what `inject` does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bootseer.kubernetes import inject, manifest_text, uninject
from bootseer.kubernetes.options import LAUNCHER, Options, Place
from tests.support.paths import DATA
from tests.support.paths import ROOT as REPOSITORY
from tools import manifests

ROOT = REPOSITORY / "k8s"
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.yaml") if path.name != "kustomization.yaml"
)
VERSIONS = ("1.27", "1.30", "1.33")
NATIVE = ("Job", "Pod", "PersistentVolumeClaim", "ConfigMap")
KUBECTL = str(Path(sys.executable).parent / "kubectl")
OPTIONS = Options(
    events=Place("claim", "bootseer-events"),
    store=Place("claim", "bootseer-store"),
    cache=Place("host", "/var/cache/bootseer"),
    config_map="bootseer-config",
)


def documents(raw: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(raw) if document]


def injected(path: Path, options: Options = OPTIONS) -> str:
    text = manifest_text.decode(path.read_bytes(), path.name)
    result = inject.inject(text, options)
    assert not result.refusals
    assert uninject.uninject(manifest_text.Text(result.raw, path.name, "\n")) == text.raw
    return result.raw


def build(folder: Path) -> list[Any]:
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def pod_specs(document: Any) -> list[Any]:
    """Every pod description in an object: what has containers."""
    found = []
    stack = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("containers"), list):
                found.append(node)
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return found


def check_references(spec: Any) -> None:
    """What no schema checks: mounts name volumes of the pod, names are unique, values are known."""
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    assert len(set(volumes)) == len(volumes)
    for container in spec.get("initContainers", []) + spec["containers"]:
        mounts = container.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= set(volumes)
        paths = [mount["mountPath"] for mount in mounts]
        assert len(set(paths)) == len(paths)
        variables = [entry["name"] for entry in container.get("env", [])]
        assert len(set(variables)) == len(variables)
        for entry in container.get("env", []):
            assert ("value" in entry) != ("valueFrom" in entry)
            if "valueFrom" in entry:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                assert path.startswith(("metadata.", "spec.nodeName"))
        assert container.get("imagePullPolicy", "Always") in ("Always", "IfNotPresent", "Never")
    for volume in spec.get("volumes", []):
        assert len(volume) == 2  # a name and one source
        assert volume.get("hostPath", {}).get("type", "") in ("", "DirectoryOrCreate", "CharDevice")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_valid_before_and_after(path: Path, version: str) -> None:
    for raw in (path.read_text(encoding="utf-8"), injected(path)):
        for document in documents(raw):
            if document["kind"] in NATIVE:
                kubernetes_validate.validate(document, version, strict=True)
            for spec in pod_specs(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
                kubernetes_validate.validate(pod, version, strict=True)
                check_references(spec)


def test_the_validator_would_notice() -> None:
    (job,) = documents(injected(ROOT / "examples/job.yaml"))
    job["spec"]["template"]["spec"]["volumes"][0]["emptydir"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_every_example_is_injected_in_every_pod() -> None:
    for path in EXAMPLES:
        for document in documents(injected(path)):
            specs = pod_specs(document)
            if document["kind"] == "TrainJob":
                assert document["spec"]["trainer"]["command"][0] == LAUNCHER
                continue
            assert specs
            for spec in specs:
                assert spec["initContainers"][0]["name"] == "bootseer-init"
                command = spec["containers"][0].get("command")
                if document["kind"] != "TrainingRuntime":
                    assert command[0] == LAUNCHER


def test_what_is_put_in_meets_the_strictest_pod_security() -> None:
    """The rules of pod security "restricted" (kubernetes.io, Pod Security Standards)."""
    options = Options(
        events=Place("claim", "events"), store=Place("claim", "store"), config_map="settings"
    )
    for path in EXAMPLES:
        for document in documents(injected(path, options)):
            for spec in pod_specs(document):
                (ours,) = [c for c in spec["initContainers"] if c["name"] == "bootseer-init"]
                security = ours["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["runAsNonRoot"] is True
                assert security["runAsUser"] > 0
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert security["seccompProfile"] == {"type": "RuntimeDefault"}
                assert "ports" not in ours
                sources = {key for volume in spec["volumes"] for key in volume} - {"name"}
                assert sources <= {"emptyDir", "persistentVolumeClaim", "configMap"}
                assert not spec.keys() & {"hostNetwork", "hostPID", "serviceAccountName"}


@pytest.mark.slow
def test_the_component_builds_what_inject_writes() -> None:
    assert manifests.files() == {
        path: path.read_text(encoding="utf-8") for path in manifests.files()
    }, "run python -m tools.manifests"
    built = build(ROOT / "examples")
    assert sorted(d["kind"] for d in built) == [
        "ConfigMap",
        "Job",
        "PersistentVolumeClaim",
        "PersistentVolumeClaim",
    ]
    (job,) = [d for d in built if d["kind"] == "Job"]
    text = manifest_text.decode((ROOT / "examples/job.yaml").read_bytes(), "job.yaml")
    (wanted,) = documents(inject.inject(text, manifests.OPTIONS).raw)
    spec, other = job["spec"]["template"]["spec"], wanted["spec"]["template"]["spec"]
    assert spec["initContainers"][0].pop("image") == "registry.example/bootseer-init:0.1.0"
    other["initContainers"][0].pop("image")
    assert spec == other
    for version in VERSIONS:
        for document in built:
            kubernetes_validate.validate(document, version, strict=True)


def write_kustomization(folder: Path, *jobs: str, more: str = "") -> None:
    """A folder with these Jobs and the component; Kustomize takes relative paths alone."""
    folder.mkdir(exist_ok=True)
    relative = Path(*[".."] * len(folder.resolve().parts[1:]), *ROOT.parts[1:])
    (folder / "jobs.yaml").write_text("---\n".join(jobs), encoding="utf-8")
    (folder / "kustomization.yaml").write_text(
        f"resources: [jobs.yaml]\ncomponents: ['{relative}/components/job']\n{more}",
        encoding="utf-8",
    )


def job_of(name: str, pod: str, labels: str = "{}") -> str:
    return (
        f"apiVersion: batch/v1\nkind: Job\nmetadata: {{name: {name}, labels: {labels}}}\n"
        f"spec: {{template: {{spec: {{restartPolicy: Never, {pod}}}}}}}\n"
    )


MAIN = "{name: main, image: i, command: [python, t.py]}"
JOBS = {
    "bare": f"containers: [{MAIN}]",
    "two-containers": f"containers: [{MAIN}, {{name: side, image: s}}]",
    "args": "containers: [{name: m, image: i, command: [sh, -c], args: ['a && b']}]",
    "own-init": f"initContainers: [{{name: first, image: f}}], containers: [{MAIN}]",
    "own-volumes": (
        "containers: [{name: m, image: i, command: [x], "
        "volumeMounts: [{name: data, mountPath: /data}]}], volumes: [{name: data, emptyDir: {}}]"
    ),
    "own-env": (
        "containers: [{name: m, image: i, command: [x], "
        "env: [{name: A, value: b}, {name: C, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]}]"
    ),
    "empty-lists": (
        "initContainers: [], volumes: [], "
        "containers: [{name: m, image: i, command: [x], env: [], volumeMounts: []}]"
    ),
    "null-volumes": "volumes: null, containers: [{name: m, image: i, command: [x]}]",
}


@pytest.mark.slow
def test_the_component_puts_into_varied_jobs_what_inject_does(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    raw = [job_of(name, pod) for name, pod in JOBS.items()]
    write_kustomization(folder, *raw)
    built = {job["metadata"]["name"]: job for job in build(folder)}
    assert built.keys() == JOBS.keys()
    by_name = {"env", "volumeMounts", "volumes"}  # Kustomize puts ours behind those of the Job
    for one in raw:
        one = one.replace("volumes: null, ", "")  # the same to a cluster
        first = documents(one)[0]["spec"]["template"]["spec"]["containers"][0]["name"]
        options = dataclasses.replace(manifests.OPTIONS, container=first)
        result = inject.inject(manifest_text.decode(one.encode(), "job.yaml"), options)
        assert not result.refusals
        (wanted,) = documents(result.raw)
        job = built[wanted["metadata"]["name"]]
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
        check_references(job["spec"]["template"]["spec"])
        for spec in (job["spec"]["template"]["spec"], wanted["spec"]["template"]["spec"]):
            for node in (spec, *spec["containers"]):
                for key in by_name & node.keys():
                    node[key] = sorted(node[key], key=lambda entry: str(entry["name"]))
        assert job["spec"] == wanted["spec"]


REAL_FORMS = sorted((DATA / "jobs").glob("*.yaml"))
OVERLAY = (
    "namePrefix: team-\nnamespace: training\nimages: [{name: python, newTag: '3.13'}]\n"
    "labels: [{pairs: {app.kubernetes.io/part-of: trials}, includeTemplates: true}]\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", OVERLAY], ids=["plain", "overlay"])
def test_the_component_on_jobs_of_real_form(tmp_path: Path, more: str) -> None:
    """Some lists there and some not, beside other objects: its first form stopped at each."""
    relative = Path(*[".."] * len(tmp_path.resolve().parts), *ROOT.parts[1:])
    for name, components in (("bare", ""), ("with", f"'{relative}/components/job'")):
        folder = tmp_path / name
        folder.mkdir()
        for path in REAL_FORMS:
            (folder / path.name).write_bytes(path.read_bytes())
        files = ", ".join(path.name for path in REAL_FORMS)
        (folder / "kustomization.yaml").write_text(
            f"resources: [{files}]\ncomponents: [{components}]\n{more}", encoding="utf-8"
        )
    bare, built = build(tmp_path / "bare"), build(tmp_path / "with")
    assert len(bare) == len(built) == 5
    jobs = 0
    for before, after in zip(bare, built, strict=True):
        if before["kind"] != "Job":
            assert after == before
            continue
        jobs += 1
        kubernetes_validate.validate(after, VERSIONS[-1], strict=True)
        first = before["spec"]["template"]["spec"]["containers"][0]["name"]
        options = dataclasses.replace(manifests.OPTIONS, container=first)
        raw = yaml.safe_dump(before, sort_keys=False)
        result = inject.inject(manifest_text.decode(raw.encode(), "job.yaml"), options)
        assert not result.refusals
        (wanted,) = documents(result.raw)
        for spec in (wanted["spec"]["template"]["spec"], after["spec"]["template"]["spec"]):
            for node in (spec, *spec["containers"]):
                for key in {"env", "volumeMounts", "volumes"} & node.keys():
                    node[key] = sorted(node[key], key=lambda entry: str(entry["name"]))
        assert after == wanted
    assert jobs == len(REAL_FORMS) == 3


@pytest.mark.slow
def test_what_a_job_says_under_our_names_is_overwritten_whole(tmp_path: Path) -> None:
    """As found: a `value` of the Job's own stood beside our `valueFrom`, which no server takes."""
    env = (
        "[{name: BOOTSEER_JOB_UID, value: mine}, "
        "{name: BOOTSEER_STORE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]"
    )
    mounts = "[{name: bootseer-store, mountPath: /s, subPath: a}]"
    main = f"{{name: m, image: i, command: [x], env: {env}, volumeMounts: {mounts}}}"
    write_kustomization(
        tmp_path, job_of("own", f"containers: [{main}]"), job_of("bare", JOBS["bare"])
    )
    built = {job["metadata"]["name"]: job["spec"]["template"]["spec"] for job in build(tmp_path)}
    own, bare = (built[name]["containers"][0] for name in ("own", "bare"))
    for key in ("env", "volumeMounts"):
        found = {entry["name"]: entry for entry in own[key]}
        assert found == {entry["name"]: entry for entry in bare[key]}


@pytest.mark.slow
def test_the_component_is_used_twice_and_leaves_what_is_labelled(tmp_path: Path) -> None:
    no = '{bootseer.io/inject: "false"}'
    write_kustomization(tmp_path / "a", job_of("one", JOBS["bare"]))
    write_kustomization(
        tmp_path / "b", job_of("two", JOBS["bare"]), job_of("no", "containers: [{name: m}]", no)
    )
    (tmp_path / "kustomization.yaml").write_text("resources: [a, b]\n", encoding="utf-8")
    built = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in build(tmp_path)}
    assert built.keys() == {"one", "two", "no"}
    for name in ("one", "two"):
        assert built[name]["containers"][0]["command"][0] == LAUNCHER
    assert built["no"] == {"restartPolicy": "Never", "containers": [{"name": "m"}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "path"),
    [
        ("name: a, image: i, args: [x]", "containers/0/command/0"),
        ("name: a, image: i, command: [x], env: null", "containers/0/env/0"),
        ("name: a, image: i, command: [x], volumeMounts: null", "containers/0/volumeMounts/0"),
    ],
)
def test_a_job_that_cannot_be_patched_stops_the_build(
    tmp_path: Path, container: str, path: str
) -> None:
    folder = tmp_path / "k"
    write_kustomization(folder, job_of("j", f"containers: [{{{container}}}]"))
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode != 0
    assert path in done.stderr
