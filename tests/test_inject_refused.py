"""Injection into manifests that cannot be injected, or only in part, or are none."""

from __future__ import annotations

import pytest
import yaml
from injecting import JOB, done, pods_of, refusal, taken_out, text

from bootseer.errors import UsageError
from bootseer.kubernetes import inject, yamltext
from bootseer.kubernetes.options import LAUNCHER, Options


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (JOB.replace("name: data\n        emptyDir", "name: bootseer\n        emptyDir"), "rename"),
        (
            JOB.replace("      containers:", "      os: {name: windows}\n      containers:"),
            "Windows",
        ),
        (
            JOB.replace(
                "      containers:",
                "      nodeSelector: {kubernetes.io/arch: arm64}\n      containers:",
            ),
            "arm64 nodes",
        ),
        (
            JOB.replace(
                "        command:\n        - python\n        - train.py", "        command: x"
            ),
            "command is not a list",
        ),
        (
            JOB.replace("      volumes:", "      - name: two\n        image: i\n      volumes:"),
            "--container",
        ),
    ],
)
def test_what_cannot_be_done_safely_is_refused(raw: str, reason: str) -> None:
    import re

    assert re.search(reason, refusal(raw))


def test_an_alias_is_not_edited_behind_its_other_users_backs() -> None:
    shared = """\
base: &pod
  spec:
    containers:
    - {name: a, command: [x]}
kind: Thing
first: *pod
second: *pod
"""
    result = inject.inject(text(shared), Options())
    assert result.raw == shared
    assert all("alias" in r.reason for r in result.refusals)
    merged = "common: &c\n  env: [{name: A, value: b}]\nkind: Pod\nspec:\n  containers:\n" + (
        "  - <<: *c\n    name: a\n    command: [x]\n"
    )
    assert "merged in by `<<`" in refusal(merged)
    alias = (
        "vols: &v [{name: d, emptyDir: {}}]\nkind: Pod\nspec:\n  volumes: *v\n  containers:\n"
        + ("  - name: a\n    command: [x]\n")
    )
    assert "volumes is written once" in refusal(alias)


def test_which_container_is_the_job() -> None:
    two = JOB.replace(
        "      volumes:",
        "      - name: two\n        image: i\n        command: [y]\n      volumes:",
    )
    assert pods_of(done(two, container="two"))[0]["containers"][1]["command"][0] == LAUNCHER
    with_gpu = two.replace("[y]\n", "[y]\n        resources: {limits: {nvidia.com/gpu: 8}}\n")
    assert pods_of(done(with_gpu))[0]["containers"][1]["command"][0] == LAUNCHER
    named = two.replace("name: two", "name: pytorch")
    assert pods_of(done(named))[0]["containers"][1]["command"][0] == LAUNCHER
    note = "    metadata:\n      annotations:\n        kubectl.kubernetes.io/"
    note += "default-container: two\n    spec:"
    annotated = two.replace("    spec:\n      restart", f"{note}\n      restart")
    assert pods_of(done(annotated))[0]["containers"][1]["command"][0] == LAUNCHER
    assert "no container 'x'; it has main, two" in refusal(two, Options(container="x"))


def test_objects_without_pods_and_definitions_are_left_alone() -> None:
    raw = """\
kind: ConfigMap
data: {a: b}
---
kind: CustomResourceDefinition
spec: {spec: {containers: [{name: a}]}}
---
- a list
---
just text
"""
    result = inject.inject(text(raw), Options())
    assert (result.raw, result.changes, result.refusals) == (raw, (), ())


def test_a_train_jobs_command_is_wrapped_and_its_runtime_brings_the_rest() -> None:
    job = "kind: TrainJob\nmetadata: {name: t}\nspec:\n  trainer:\n    command:\n    - torchrun\n"
    new = done(job)
    assert yaml.safe_load(new)["spec"]["trainer"]["command"] == [
        LAUNCHER,
        "start",
        "--",
        "torchrun",
    ]
    assert taken_out(new) == job
    runtime = """\
kind: ClusterTrainingRuntime
metadata: {name: r}
spec:
  template:
    spec:
      replicatedJobs:
      - name: node
        template: {spec: {template: {spec: {containers: [{name: node, image: i}]}}}}
"""
    (pod,) = pods_of(done(runtime))
    assert "command" not in pod["containers"][0]
    assert pod["initContainers"][0]["name"] == "bootseer-init"
    assert taken_out(done(runtime)) == runtime


# --- text that is none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("kind: Pod\nspec:\n\tcontainers: []\n", r"line 3: .*a tab indents this line"),
        ("a: [1, 2\n", r"line \d: not valid YAML"),
        ("kind: Pod\nkind: Job\n", r"line 2: the key 'kind' is there twice"),
        ("kind: Pod\na: \x7f\n", "line 2: a control character"),
        ("\ufeffkind: Pod\n", "byte order mark"),
        ("[" * 5000, "not valid YAML|nested"),
    ],
)
def test_malformed_text_is_one_clear_error(raw: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inject.inject(text(raw), Options())


def test_bytes_that_are_no_text_are_one_clear_error() -> None:
    with pytest.raises(UsageError, match="line 2: not UTF-8"):
        yamltext.decode(b"a: 1\nb: \xff\n", "x.yaml")
