"""Injection into manifests that cannot be injected, or only in part, or are none."""

from __future__ import annotations

import pytest
import yaml

from bootseer.errors import UsageError
from bootseer.kubernetes import inject, manifest_text
from bootseer.kubernetes.options import LAUNCHER, Options
from tests.support.samples.manifests import JOB, done, pods_of, refusal, taken_out, text


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (JOB.replace("name: data\n        emptyDir", "name: bootseer\n        emptyDir"), "rename"),
        (
            JOB.replace("      containers:", "      os: {name: windows}\n      containers:"),
            "windows nodes",
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


def on_nodes(lines: str) -> str:
    return JOB.replace("      containers:", f"      {lines}\n      containers:")


def affinity(*terms: str, kind: str = "required") -> str:
    expressions = [f"{{matchExpressions: [{term}]}}" for term in terms]
    if kind == "required":
        inner = f"{{nodeSelectorTerms: [{', '.join(expressions)}]}}"
    else:
        inner = f"[{', '.join(f'{{weight: 1, preference: {term}}}' for term in expressions)}]"
    rule = f"{kind}DuringSchedulingIgnoredDuringExecution"
    return f"affinity: {{nodeAffinity: {{{rule}: {inner}}}}}"


def expression(values: str, operator: str = "In", key: str = "kubernetes.io/arch") -> str:
    return f"{{key: {key}, operator: {operator}, values: [{values}]}}"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("nodeSelector: {kubernetes.io/os: windows}", "windows"),
        ("nodeSelector: {beta.kubernetes.io/os: windows}", "windows"),
        ("nodeSelector: {node.kubernetes.io/windows-build: 10.0.20348}", "windows"),
        ("securityContext: {windowsOptions: {hostProcess: true}}", "windows"),
        ("nodeSelector: {kubernetes.io/arch: arm64}", "arm64"),
        ("nodeSelector: {beta.kubernetes.io/arch: ppc64le}", "ppc64le"),
        (affinity(expression("arm64")), "arm64"),
        (affinity(expression("amd64, arm64")), "arm64"),
        (affinity(expression("amd64"), expression("arm64")), "arm64"),
        (affinity(expression("amd64", "NotIn")), "other than amd64"),
        (affinity(expression("windows", key="kubernetes.io/os")), "windows"),
        (affinity(expression("s390x", key="beta.kubernetes.io/arch")), "s390x"),
        (affinity(expression("arm64"), kind="preferred"), "arm64"),
    ],
)
def test_pods_for_nodes_that_the_wrapper_cannot_run_on_are_refused(lines: str, named: str) -> None:
    assert f"it may run on {named} nodes" in refusal(on_nodes(lines))


@pytest.mark.parametrize(
    "lines",
    [
        "nodeSelector: {kubernetes.io/os: linux, kubernetes.io/arch: amd64}",
        "nodeSelector: {kubernetes.io/arch: amd64}\n      " + affinity(expression("amd64, arm64")),
        affinity(expression("amd64")),
        affinity(expression("arm64", "NotIn")),
        affinity(f"{expression('amd64, arm64')}, {expression('arm64', 'NotIn')}"),
        affinity(expression("arm64", key="example.com/board")),
        affinity(expression("", "Exists")),
        affinity(expression("amd64"), kind="preferred"),
    ],
)
def test_pods_for_nodes_that_the_wrapper_runs_on_are_injected(lines: str) -> None:
    raw = on_nodes(lines)
    assert taken_out(done(raw)) == raw != done(raw)


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
        ("kind: Pod\nmetadata:\n  name: {{ uid }}\n", r"line 3: a key that is no text.*render it"),
        ("kind: Pod\n{{- if .Values.a }}\na: b\n{{- end }}\n", r"\(line 2 has .* render it first"),
        ("kind: Pod\n{% if a %}\na: b\n{% endif %}\n", r"\(line 2 has .* render it first"),
        ("metadata:\n  - {{ .Values.x }}: b\n", "render it first"),
    ],
)
def test_malformed_text_is_one_clear_error(raw: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inject.inject(text(raw), Options())


def test_a_workflows_quoted_braces_are_no_template() -> None:
    raw = 'kind: Workflow\na: "{{workflow.name}}"\nb: [1, 2\n'
    with pytest.raises(UsageError, match="correct the file") as caught:
        inject.inject(text(raw), Options())
    assert "render" not in str(caught.value)


def test_bytes_that_are_no_text_are_one_clear_error() -> None:
    with pytest.raises(UsageError, match="line 2: not UTF-8"):
        manifest_text.decode(b"a: 1\nb: \xff\n", "x.yaml")
