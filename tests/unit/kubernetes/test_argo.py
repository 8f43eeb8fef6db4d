"""Injection into the templates of Argo Workflows, which have no pod's template."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from bootseer.kubernetes import check, inject
from bootseer.kubernetes.options import LAUNCHER, Options
from bootseer.storage.oci.config import ImageConfig
from tests.support.samples.manifests import done, refusal, taken_out, text

WORKFLOW = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  generateName: train-
spec:
  entrypoint: main
  templates:
  - name: main
    steps:
    - - name: get
        template: get
    - - name: train
        template: train
        arguments: {parameters: [{name: size, value: "8"}]}
  - name: get
    container:   # the data
      image: alpine:3.20
      command: [sh, -c]
      args: ["echo {{workflow.name}} > /tmp/out"]
    outputs:
      artifacts:
      - {name: out, path: /tmp/out}
  - name: train
    inputs: {parameters: [{name: size}]}
    nodeSelector: {gpu: "yes"}
    script:
      image: python:3.12
      command: [python]
      source: |
        print("{{inputs.parameters.size}}")
    volumes:
    - name: data
      emptyDir: {}
"""
WITHOUT = WORKFLOW.replace("      command: [sh, -c]\n", "").replace("      command: [python]\n", "")
CRON = f"""\
apiVersion: argoproj.io/v1alpha1
kind: CronWorkflow
metadata: {{name: nightly}}
spec:
  schedule: "0 3 * * *"
  workflowSpec:
{"".join("  " + line for line in WORKFLOW.partition("spec:" + chr(10))[2].splitlines(True))}"""
CONFIG = ImageConfig(("/entry", "$HOME"), ("serve",))


def templates_of(raw: str) -> dict[str, Any]:
    spec = yaml.safe_load(raw)["spec"]
    return {one["name"]: one for one in spec.get("workflowSpec", spec)["templates"]}


def check_template(template: dict[str, Any], form: str, command: list[str]) -> None:
    assert [one["name"] for one in template["initContainers"]] == ["bootseer-init"]
    volumes = [one["name"] for one in template["volumes"]]
    container = template[form]
    assert container["command"] == command
    assert {one["name"] for one in container["volumeMounts"]} <= set(volumes)
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
        if "valueFrom" in one
    }
    assert fields["BOOTSEER_JOB_UID"] == "metadata.uid"


@pytest.mark.parametrize(
    "raw",
    [
        WORKFLOW,
        CRON,
        WORKFLOW.replace("kind: Workflow", "kind: WorkflowTemplate"),
        WORKFLOW.replace("kind: Workflow", "kind: ClusterWorkflowTemplate"),
        WORKFLOW.replace("\n", "\r\n"),
    ],
)
def test_each_template_with_a_container_is_injected(raw: str) -> None:
    new = done(raw)
    templates = templates_of(new)
    check_template(templates["get"], "container", [LAUNCHER, "start", "--", "sh", "-c"])
    check_template(templates["train"], "script", [LAUNCHER, "start", "--", "python"])
    assert templates["main"].keys() == {"name", "steps"}
    assert [one["name"] for one in templates["train"]["volumes"]] == [
        "bootseer",
        "bootseer-events",
        "data",
    ]
    assert taken_out(new) == raw
    assert done(new) == new
    # A tool that wrote it anew kept no mark of ours.
    plain = yaml.safe_dump(yaml.safe_load(new))
    assert yaml.safe_load(taken_out(plain)) == yaml.safe_load(raw)


def test_a_template_in_flow_style_and_one_within_a_step_are_injected() -> None:
    raw = (
        '{"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "a"}, '
        '"spec": {"templates": [{"name": "d", "dag": {"tasks": [{"name": "t", "inline": '
        '{"container": {"image": "i", "command": ["x"]}}}]}}]}}'
    )
    new = done(raw)
    inline = templates_of(new)["d"]["dag"]["tasks"][0]["inline"]
    check_template(inline, "container", [LAUNCHER, "start", "--", "x"])
    assert taken_out(new) == raw


def test_commands_come_from_the_images() -> None:
    result = inject.inject(text(WITHOUT), Options(), lambda _: CONFIG)
    assert not result.refusals
    templates = templates_of(result.raw)
    entry = [LAUNCHER, "start", "--", "/entry", "$$HOME"]
    check_template(templates["get"], "container", entry)
    # Argo gives the script's path as the one argument, so the image's CMD falls away.
    check_template(templates["train"], "script", entry)
    assert "args" not in templates["train"]["script"]
    assert taken_out(result.raw) == WITHOUT
    plain = WITHOUT.replace('      args: ["echo {{workflow.name}} > /tmp/out"]\n', "")
    result = inject.inject(text(plain), Options(), lambda _: CONFIG)
    assert templates_of(result.raw)["get"]["container"]["args"] == ["serve"]


def test_a_template_is_picked_by_its_own_name() -> None:
    result = inject.inject(text(WORKFLOW), Options(container="train"))
    templates = templates_of(result.raw)
    check_template(templates["train"], "script", [LAUNCHER, "start", "--", "python"])
    assert "initContainers" not in templates["get"]
    (passed,) = result.passed_over
    assert passed.pod == "Workflow/train- spec.templates[1]"
    commands = {"train-/get": ("sh",), "Workflow/train-/train": ("python3",)}
    templates = templates_of(done(WITHOUT, commands=commands))
    assert templates["get"]["container"]["command"][-1] == "sh"
    assert templates["train"]["script"]["command"][-1] == "python3"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "    container:   # the data\n",
            '    podSpecPatch: \'{"containers": [{"name": "main", "command": ["y"]}]}\'\n'
            "    container:   # the data\n",
            "podSpecPatch names a command",
        ),
        (
            "  entrypoint: main\n",
            "  entrypoint: main\n  nodeSelector: {kubernetes.io/arch: arm64}\n",
            "it may run on arm64 nodes",
        ),
        (
            "  entrypoint: main\n",
            "  entrypoint: main\n  templateDefaults: {container: {command: [y]}}\n",
            "its command comes from templateDefaults",
        ),
        (
            "    container:   # the data\n",
            "    containerSet: {containers: [{name: a, image: i, command: [x]}]}\n    other:\n",
            "start one after the other in one pod",
        ),
    ],
)
def test_a_template_whose_command_is_anothers_is_refused(old: str, new: str, reason: str) -> None:
    without_script = WITHOUT.partition("  - name: train\n    inputs")[0]
    assert reason in refusal(without_script.replace(old, new), None, lambda _: CONFIG)


def test_each_template_is_looked_at() -> None:
    findings = check.check(text(done(WORKFLOW)), Options())
    assert [(one.container, one.injected, one.refusal) for one in findings] == [
        ("get", True, ""),
        ("train", True, ""),
    ]
    assert not any("unknown" in note for one in findings for note in one.notes)
