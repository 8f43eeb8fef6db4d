"""Manifests that are hard to edit: odd layouts, shared parts, texts that look like ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from bootseer.errors import UsageError
from bootseer.kubernetes import inject
from bootseer.kubernetes.options import LAUNCHER, Options, Place
from bootseer.storage.oci.config import ImageConfig
from tests.support.samples.manifests import JOB, POD_FLOW, done, pods_of, refusal, taken_out, text

MAIN = "    name: a\n    command: [x]\n"
ANCHORED_ITEM = f"kind: Pod\nspec:\n  containers:\n  -   &main\n{MAIN}"
ANCHORED_LINE = "kind: Pod\nspec:\n  containers:\n  -   &main name: a\n      command: [x]\n"
ANCHORED_SPEC = f"kind: Pod\nspec: &spec\n  containers: &list\n  - &c\n{MAIN}"
ANCHORED_LISTS = """\
kind: Pod
spec:
  volumes: &v   # [ not this
    [{name: d, emptyDir: {}}]
  containers:
  - name: a
    command: &words
    - x
    env: &env [ ]
    volumeMounts: !!seq [{name: d, mountPath: /d}]
"""
DIRECTIVE = f"%YAML 1.1\n---   # first\n{JOB}...\n--- # second\n{JOB}"
SCRIPT = """\
kind: Pod
spec:
  restartPolicy: Never
  initContainers:
  # a sidecar of its own
  - name: proxy
    image: proxy
    restartPolicy: Always
  containers:
    # the job
    -
      name: a
      # its words
      command:
      # first
      - sh
      - -c
      - |
        # bootseer:begin is only text here
        echo "käse 🧀"

      # after the words

      env:
      # nothing yet
      volumeMounts: null
  # the end
"""
WIDE = "kind: Pod\nspec:\n     containers:\n            -     command:\n                   - x\n"
WIDE += "                  name: a"
TABBED = json.dumps({"kind": "Pod", "spec": {"containers": [{"name": "a", "command": ["x"]}]}})
TABBED = json.dumps(json.loads(TABBED), indent="\t")
NESTED_LISTS = json.dumps(
    {"kind": "List", "items": [{"kind": "PodList", "items": [json.loads(POD_FLOW)] * 2}]}
)
ODD_CRLF = (SCRIPT.rstrip("\n") + "\n---\n" + JOB.rstrip("\n")).replace("\n", "\r\n")

HARD = [
    ANCHORED_ITEM,
    ANCHORED_LINE,
    ANCHORED_SPEC,
    ANCHORED_LISTS,
    DIRECTIVE,
    SCRIPT,
    WIDE,
    TABBED,
    NESTED_LISTS,
    ODD_CRLF,
]


@pytest.mark.parametrize("raw", HARD)
def test_hard_layouts_are_injected_and_come_back(raw: str) -> None:
    new = done(raw)
    assert len(pods_of(new)) == len(pods_of(raw)) > 0
    for before, after in zip(pods_of(raw), pods_of(new), strict=True):
        assert after["initContainers"][0]["name"] == "bootseer-init"
        assert after["initContainers"][1:] == before.get("initContainers", [])
        old, main = before["containers"][0], after["containers"][0]
        assert main["command"] == [LAUNCHER, "start", "--", *old["command"]]
        assert {m["name"] for m in main["volumeMounts"]} >= {"bootseer", "bootseer-events"}
        assert main["env"][0]["name"] == "BOOTSEER_EVENTS"
    assert taken_out(new) == raw
    assert done(new) == new


def test_a_text_that_holds_an_injected_manifest_stays_as_it_is() -> None:
    inner = "".join(f"    {line}\n" for line in done(JOB).splitlines())
    quoted = json.dumps(done(JOB))
    raw = f"kind: ConfigMap\ndata:\n  a.yaml: |\n{inner}  b: {quoted}\n"
    folded = raw.replace(": |", ": >-")
    plain = f"kind: Thing\nspec:\n  text: |2-\n{inner}# end\n"
    for text_only in (raw, folded, plain):
        assert taken_out(text_only) == text_only
        assert done(text_only) == text_only
        both = f"{text_only}---\n{JOB}"
        assert taken_out(done(both)) == both


def test_what_another_container_shares_is_not_changed_for_it() -> None:
    def two(first: str, second: str) -> str:
        return f"kind: Pod\nspec:\n  containers:\n{first}{second}"

    side = "  - name: side\n    command: *shared\n"
    raw = two("  - name: a\n    command: &shared [x]\n", side)
    assert "command is written once and used at several places" in refusal(
        raw, Options(container="a")
    )
    raw = two("  - &a\n    name: a\n    command: [x]\n", "  - <<: *a\n    name: side\n")
    assert "this container is written once" in refusal(raw, Options(container="a"))
    raw = two("  - name: a\n    command: [x]\n    env: &e []\n", "  - {name: b, env: *e}\n")
    assert "env is written once" in refusal(raw, Options(container="a"))


def test_names_and_containers_that_are_merged_in_are_seen_and_refused() -> None:
    base = "base: &b\n  name: a\n  containers: [{name: a, command: [x]}]\n"
    merged = f"{base}kind: Pod\nspec:\n  containers:\n  - <<: *b\n    command: [x]\n"
    assert "merged in by `<<`" in refusal(merged)
    whole = f"{base}kind: Pod\nspec:\n  <<: *b\n  volumes: []\n"
    assert "written once" in refusal(whole) or "merged in" in refusal(whole)


@pytest.mark.parametrize(
    "raw",
    [
        "kind: Pod\nx: &a\n- *a\n",
        "&a\nkind: Pod\nmetadata: *a\n",
        "kind: X\na: &a [x, x]\n" + "".join(f"{n}: &n{n} [*a, *a, *a]\n" for n in range(30)),
        "kind: X\n"
        + "n0: &n0 [x]\n"
        + "".join(f"n{n}: &n{n} [{', '.join([f'*n{n - 1}'] * 9)}]\n" for n in range(1, 60)),
    ],
)
def test_circles_and_bombs_of_aliases_end(raw: str) -> None:
    result = inject.inject(text(raw), Options())
    assert (result.raw, result.changes) == (raw, ())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"a":' * 300 + "1" + "}" * 300, "nested too deeply"),
        (JOB.replace("\n", "\r"), "line 1: a carriage return without a newline"),
    ],
)
def test_text_that_is_no_manifest(raw: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inject.inject(text(raw), Options())


def test_a_character_that_ends_a_line_for_some_readers_only() -> None:
    odd = JOB.replace("# a job", "# a\u2028kind: b")
    assert taken_out(done(JOB.replace("# the job", "# the job \u00fc"))) != ""
    assert "U+2028" in refusal(JOB.replace("# what runs", "#\u2028        # what runs"))
    assert odd != JOB
    words = ("python", "a\u2028b\u0085c\ufeff")
    bare = "kind: Pod\nspec:\n  containers:\n  - name: a\n    image: i\n"
    new = done(bare, command=words)
    assert pods_of(new)[0]["containers"][0]["command"][3:] == list(words)
    assert taken_out(new) == bare


def test_a_mount_where_ours_goes() -> None:
    raw = JOB.replace("mountPath: /data", "mountPath: /opt/bootseer/")
    assert "/opt/bootseer is where a volume of ours goes" in refusal(raw)


def test_things_that_others_put_between_ours_survive() -> None:
    document = json.loads(done(POD_FLOW))
    spec = document["spec"]
    spec["volumes"].insert(1, {"name": "theirs", "emptyDir": {}})
    spec["containers"][0]["env"].insert(2, {"name": "THEIRS", "value": "1"})
    spec["containers"][0]["volumeMounts"].insert(1, {"name": "theirs", "mountPath": "/t"})
    for edited in (json.dumps(document), yaml.safe_dump(document)):
        (bare,) = pods_of(taken_out(edited))
        assert [v["name"] for v in bare["volumes"]] == ["theirs"]
        assert [v["name"] for v in bare["containers"][0]["env"]] == ["THEIRS"]
        assert [v["name"] for v in bare["containers"][0]["volumeMounts"]] == ["theirs"]


TIERS = [{"tier": "privileged"}, {"tier": "fuse", "fuse_resource": "x/fuse"}]


def context(**main: Any) -> str:
    return json.dumps(
        {"kind": "Pod", "spec": {"containers": [{"name": "a", "command": ["x"], **main}]}}
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "raw",
    [
        POD_FLOW,
        context(resources={"limits": {"cpu": 1}}, securityContext={"runAsUser": 1}),
        context(resources={"limits": {}}, securityContext={}),
        context(resources={"requests": {"cpu": 1}}),
        JOB.replace("        env:", "        resources: {limits: {cpu: 1}}\n        env:"),
        JOB.replace("        env:", "        securityContext: {runAsUser: 1}\n        env:"),
    ],
)
def test_a_tier_comes_out_again_in_every_style(raw: str, tier: dict[str, Any]) -> None:
    new = done(raw, **tier)
    (main,) = (pod["containers"][0] for pod in pods_of(new))
    if tier["tier"] == "privileged":
        assert main["securityContext"]["privileged"] is True
    else:
        assert main["resources"]["limits"]["x/fuse"] == 1
    assert taken_out(new) == raw
    assert done(new, **tier) == new
    for again in (
        yaml.safe_dump_all(list(yaml.safe_load_all(new))),
        json.dumps(yaml.safe_load(new), sort_keys=True),
    ):
        bare = taken_out(again)
        assert "fuse" not in bare
        assert "privileged" not in bare
        yaml.safe_load(bare)


def test_a_privilege_that_the_manifest_forbids() -> None:
    raw = context(securityContext={"allowPrivilegeEscalation": False})
    assert "allowPrivilegeEscalation is false" in refusal(raw, Options(tier="privileged"))


def test_a_runtime_that_a_tool_wrote_anew_stays_whole() -> None:
    runtime = {
        "kind": "TrainingRuntime",
        "spec": {"template": {"spec": {"containers": [{"name": "node", "image": "i"}]}}},
    }
    again = yaml.safe_dump(yaml.safe_load(done(yaml.safe_dump(runtime))))
    assert yaml.safe_load(taken_out(again)) == runtime
    (pod,) = pods_of(again)
    path = pod["containers"][0]["env"][1]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"


def test_an_image_without_entrypoint_written_anew_stays_whole() -> None:
    raw = "kind: Pod\nspec:\n  containers:\n  - image: i\n    name: a\n"
    result = inject.inject(text(raw), Options(), lambda _: ImageConfig(("/e",), ()))
    again = yaml.safe_dump(yaml.safe_load(result.raw))
    assert "bootseer" not in taken_out(again)
    yaml.safe_load(taken_out(again))


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    own = {"cpu": "8", "memory": "64Gi"}
    (pod,) = pods_of(done(context(resources={"limits": own})))
    assert pod["initContainers"][0]["resources"] == {"limits": own, "requests": own}
    for other in ({"limits": own, "requests": {"cpu": "1"}}, {"limits": {"cpu": "1"}}, {}):
        (pod,) = pods_of(done(context(resources=other)))
        assert pod["initContainers"][0]["resources"]["requests"]["memory"] == "32Mi"


def test_a_checkpoint_alone_gets_the_store_too() -> None:
    options = Options(parts=("events", "checkpoint"), store=Place("claim", "store"))
    (pod,) = pods_of(done(POD_FLOW, options))
    assert "bootseer-store" in [v["name"] for v in pod["volumes"]]


def test_five_megabytes_of_a_hundred_thousand_lines() -> None:
    comments = "".join(f"# line {n} of the notes\n" for n in range(100_000))
    raw = f"{comments}{JOB}{comments}---\n{JOB}"
    assert len(raw) > 5_000_000 - 200_000
    assert taken_out(done(raw)) == raw
