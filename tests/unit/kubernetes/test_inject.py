"""Injection into manifests: what is put in, and that exactly that comes out again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.kubernetes import inject
from bootseer.kubernetes.options import LAUNCHER, Options, Place
from bootseer.storage.oci.config import ImageConfig
from tests.support.samples.manifests import (
    JOB,
    POD_FLOW,
    POD_WINDOWS,
    SAMPLES,
    done,
    pods_of,
    refusal,
    taken_out,
    text,
)


@pytest.mark.parametrize("raw", SAMPLES)
def test_every_pod_gets_everything_and_gives_it_back_to_the_byte(raw: str) -> None:
    new = done(raw)
    before, after = pods_of(raw), pods_of(new)
    assert len(before) == len(after) > 0
    for old, pod in zip(before, after, strict=True):
        assert pod["initContainers"][0]["name"] == "bootseer-init"
        volumes = [v["name"] for v in pod["volumes"]]
        assert volumes[:2] == ["bootseer", "bootseer-events"]
        assert volumes[2:] == [v["name"] for v in old.get("volumes") or []]
        old_main, main = old["containers"][0], pod["containers"][0]
        assert main["command"] == [LAUNCHER, "start", "--", *old_main["command"]]
        assert [m["name"] for m in main["volumeMounts"]][:2] == ["bootseer", "bootseer-events"]
        names = [entry["name"] for entry in main["env"]]
        assert names.index("BOOTSEER_EVENTS") == 0
        assert names[names.index("BOOTSEER_INJECTED") + 1 :] == [
            entry["name"] for entry in old_main.get("env") or []
        ]
    assert taken_out(new) == raw
    assert done(new) == new


@pytest.mark.parametrize("raw", SAMPLES)
def test_the_original_stands_in_the_result_untouched(raw: str) -> None:
    """Only insertions: the original is what is left when characters are left out."""
    rest = iter(done(raw))
    assert all(character in rest for character in raw)


@pytest.mark.parametrize("raw", SAMPLES)
def test_a_manifest_that_a_tool_wrote_anew_loses_all_of_ours(raw: str) -> None:
    again = yaml.safe_dump_all(list(yaml.safe_load_all(done(raw))), sort_keys=True)
    bare = taken_out(again)
    assert "bootseer" not in bare
    wanted = [[c["command"] for c in pod["containers"]] for pod in pods_of(raw)]
    assert [[c["command"] for c in pod["containers"]] for pod in pods_of(bare)] == wanted


def test_windows_newlines_stay() -> None:
    new = done(POD_WINDOWS)
    assert new.count("\n") == new.count("\r\n")


def test_edits_made_after_injecting_survive() -> None:
    new = done(JOB)
    edited = new.replace('value: "1"', 'value: "2"').replace("- train.py", "- train2.py")
    edited = edited.replace("# a job", "# our job")
    wanted = JOB.replace('value: "1"', 'value: "2"').replace("- train.py", "- train2.py")
    assert taken_out(edited) == wanted.replace("# a job", "# our job")
    flow = done(POD_FLOW).replace('"x"]', '"x", "--lr", "2"]')
    assert json.loads(taken_out(flow))["spec"]["containers"][0]["command"] == ["x", "--lr", "2"]


def test_items_that_others_put_before_ours_survive() -> None:
    new = done(POD_FLOW)
    document = json.loads(new)
    main = document["spec"]["containers"][0]
    main["env"].insert(0, {"name": "K", "value": "v"})
    main["env"].append({"name": "K8S_NODE_NAME", "value": "mine"})
    bare = json.loads(taken_out(json.dumps(document)))["spec"]["containers"][0]
    assert [entry["name"] for entry in bare["env"]] == ["K", "K8S_NODE_NAME"]


def test_lines_changed_between_our_marks_are_not_thrown_away() -> None:
    new = done(JOB).replace(
        "        emptyDir: {}\n      # bootseer:end", "        mine: 1\n      # bootseer:end", 1
    )
    assert new != done(JOB)
    with pytest.raises(CorruptDataError, match=r"job.yaml, line \d+: lines between the bootseer"):
        taken_out(new)
    with pytest.raises(CorruptDataError, match="has no end"):
        taken_out(done(JOB).replace("# bootseer:end", "# end"))


def test_another_version_is_brought_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    from bootseer.kubernetes import additions

    monkeypatch.setattr(additions, "__version__", "0.0.9")
    old = done(JOB, image="bootseer-init:0.0.9")
    monkeypatch.undo()
    assert "0.0.9" in old
    assert done(old) == done(JOB)
    assert done(POD_FLOW) == done(done(POD_FLOW, image="other:1"))


def test_variables_that_the_manifest_sets_are_left_as_they_are() -> None:
    raw = JOB.replace("name: A", "name: BOOTSEER_EVENTS")
    (pod,) = pods_of(done(raw))
    events = [e for e in pod["containers"][0]["env"] if e["name"] == "BOOTSEER_EVENTS"]
    assert events == [{"name": "BOOTSEER_EVENTS", "value": "1"}]
    assert taken_out(done(raw)) == raw


def test_parts_and_places_decide_volumes_and_words() -> None:
    (pod,) = pods_of(done(JOB, parts=("events",)))
    assert pod["containers"][0]["command"][:3] == [LAUNCHER, "run", "--"]
    (pod,) = pods_of(done(JOB, parts=("events", "image"), store=Place("host", "/srv/store")))
    assert pod["containers"][0]["command"][:3] == [LAUNCHER, "start", "--"]
    assert "bootseer-store" in [volume["name"] for volume in pod["volumes"]]
    options = Options(
        events=Place("claim", "events"),
        store=Place("host", "/srv/store"),
        cache=Place("host", "/srv/cache"),
        config_map="settings",
    )
    (pod,) = pods_of(done(JOB, options))
    volumes = {v.pop("name"): v for v in pod["volumes"]}
    assert volumes["bootseer-events"] == {"persistentVolumeClaim": {"claimName": "events"}}
    assert volumes["bootseer-store"]["hostPath"]["path"] == "/srv/store"
    assert volumes["bootseer-config"] == {"configMap": {"name": "settings"}}
    main = pod["containers"][0]
    assert main["command"][1:4] == ["start", "-c", "/bootseer/config/bootseer.toml"]
    values = {e["name"]: e.get("value") for e in main["env"]}
    assert values["BOOTSEER_STORE"] == "/bootseer/store"
    url = "webhdfs://nn:50070/snapshots"
    (pod,) = pods_of(done(JOB, store_url=url))
    values = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
    assert values["BOOTSEER_STORE"] == url


@pytest.mark.parametrize(
    ("raw", "needle"),
    [
        (JOB, "x/fuse: 1"),
        (
            JOB.replace(
                "        env:",
                "        resources: \n          limits:\n            cpu: 2\n        env:",
            ),
            "x/fuse: 1",
        ),
        (
            JOB.replace(
                "        env:", "        resources:\n          requests: {cpu: 2}\n        env:"
            ),
            "x/fuse: 1",
        ),
    ],
)
def test_a_fuse_device_is_asked_for(raw: str, needle: str) -> None:
    options = Options(tier="fuse", fuse_resource="x/fuse")
    new = done(raw, options)
    assert pods_of(new)[0]["containers"][0]["resources"]["limits"]["x/fuse"] == 1
    assert needle in new
    assert taken_out(new) == raw


def test_a_privileged_container_is_asked_for() -> None:
    new = done(JOB, tier="privileged")
    assert pods_of(new)[0]["containers"][0]["securityContext"] == {"privileged": True}
    assert taken_out(new) == JOB
    denied = JOB.replace(
        "        env:", "        securityContext:\n          privileged: false\n        env:"
    )
    assert "privileged is set there already" in refusal(denied, Options(tier="privileged"))


# --- commands that come from the image ----------------------------------------------------------

BARE = "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: a\n    image: repo/i:1\n"


def test_an_images_own_command_is_written_out() -> None:
    asked = []

    def resolve(image: str) -> ImageConfig:
        asked.append(image)
        return ImageConfig(("/entry",), ("serve", "--all"))

    result = inject.inject(text(BARE), Options(), resolve)
    (pod,) = pods_of(result.raw)
    assert pod["containers"][0]["command"] == [LAUNCHER, "start", "--", "/entry"]
    assert pod["containers"][0]["args"] == ["serve", "--all"]
    assert asked == ["repo/i:1"]
    assert taken_out(result.raw) == BARE
    flow = json.dumps(yaml.safe_load(BARE))
    assert taken_out(inject.inject(text(flow), Options(), resolve).raw) == flow


def test_arguments_of_the_manifest_go_to_the_images_entrypoint() -> None:
    raw = BARE + "    args: [--lr, '1']\n"
    result = inject.inject(text(raw), Options(), lambda _: ImageConfig(("/entry",), ("serve",)))
    main = pods_of(result.raw)[0]["containers"][0]
    assert (main["command"][3:], main["args"]) == (["/entry"], ["--lr", "1"])
    result = inject.inject(text(raw), Options(), lambda _: ImageConfig((), ("serve",)))
    main = pods_of(result.raw)[0]["containers"][0]
    assert (main["command"], main["args"]) == ([LAUNCHER, "start", "--"], ["--lr", "1"])


def test_dollars_of_an_image_stay_dollars() -> None:
    """Kubernetes expands `$(NAME)` and `$$` in a manifest's words, never in an image's."""
    config = ImageConfig(("sh", "-c", "echo $$ $(HOME) $1"), ("a$$", "$(PATH)"))
    main = pods_of(inject.inject(text(BARE), Options(), lambda _: config).raw)[0]["containers"][0]
    assert main["command"][3:] == ["sh", "-c", "echo $$$$ $$(HOME) $$1"]
    assert main["args"] == ["a$$$$", "$$(PATH)"]


EMPTY = ["[]", "", "null", "~", "Null  # none", "[ ]  # none", "   # later", "!!seq []", "&c []"]


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("args", ["", "    args: [x]\n", "    args: []\n", "    args:\n"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_an_empty_command_is_the_images(empty: str, args: str, newline: str) -> None:
    config = ImageConfig(("/entry",), ("serve",))
    raw = f"{BARE}{args}    command: {empty}\n".replace("\n", newline)
    for written in (raw, raw.rstrip("\r\n"), f"{raw}    tty: true{newline}"):
        result = inject.inject(text(written), Options(), lambda _: config)
        assert not result.refusals
        main = pods_of(result.raw)[0]["containers"][0]
        last = "x" if "x" in args else "serve"
        words = [*main["command"], *(main.get("args") or [])]
        assert words == [LAUNCHER, "start", "--", "/entry", last]
        assert taken_out(result.raw) == written
        assert inject.inject(text(result.raw), Options(), lambda _: config).raw == result.raw


@pytest.mark.parametrize("empty", ["[]", "", "null"])
def test_an_empty_command_that_begins_its_container_is_filled(empty: str) -> None:
    raw = f"kind: Pod\nspec:\n  containers:\n  - command: {empty}\n    name: a\n"
    new = done(raw, command=("train",))
    assert pods_of(new)[0]["containers"][0]["command"] == [LAUNCHER, "start", "--", "train"]
    assert (taken_out(new), done(new, command=("train",))) == (raw, new)


@pytest.mark.parametrize("empty", ["[]", "null", ""])
def test_empty_arguments_keep_the_images_own(empty: str) -> None:
    config = ImageConfig(("/entry",), ("serve",))
    raw = f"{BARE}    args: {empty}\n"
    flow = json.dumps(yaml.safe_load(raw))
    for written in (raw, flow):
        result = inject.inject(text(written), Options(), lambda _: config)
        main = pods_of(result.raw)[0]["containers"][0]
        assert main["command"] == [LAUNCHER, "start", "--", "/entry", "serve"]
        assert not main["args"]
        assert taken_out(result.raw) == written


@pytest.mark.parametrize("blank", ["", " ", "  ", "\n  "])
def test_an_empty_command_in_flow_style_is_filled(blank: str) -> None:
    raw = POD_FLOW.replace('["x"]', f"[{blank}]")
    new = done(raw, command=("train", "a b"))
    assert pods_of(new)[0]["containers"][0]["command"][3:] == ["train", "a b"]
    assert (taken_out(new), done(new, command=("train", "a b"))) == (raw, new)


NULLS = ("null", "~", "Null", "NULL", "", "[]")
IN_BLOCKS = """\
kind: Pod
spec:
  initContainers: {0}
  volumes:
    {1}
  containers:
  - env: {2}   # none
    command: {3}
    name: a
    volumeMounts: {4}"""
IN_FLOW = """\
kind: Pod
spec: {{initContainers: {0}, volumes: {1},
  containers: [{{command: {2}, env:   {3}
  , name: a, volumeMounts: {4}}}]}}
"""
IN_JSON = (
    '{{"kind": "Pod", "spec": {{"initContainers": {0}, "volumes" : {1}, "containers": '
    '[{{"name": "a", "env":{2}, "command": {3}, "volumeMounts": {4}}}]}}}}'
)


@pytest.mark.parametrize("form", [IN_BLOCKS, IN_FLOW, IN_JSON], ids=["blocks", "flow", "json"])
def test_null_is_no_list_wherever_it_is_written(form: str) -> None:
    """The API takes null as absent; only one left empty, in block style, was."""
    for one, two in itertools.product(NULLS, repeat=2):
        raw = form.format(one, two, two, one, two)
        new = done(raw, command=("train", "a b"))
        (pod,) = pods_of(new)
        (main,) = pod["containers"]
        assert pod["initContainers"][0]["name"] == "bootseer-init"
        assert [v["name"] for v in pod["volumes"]] == ["bootseer", "bootseer-events"]
        assert [v["name"] for v in main["volumeMounts"]] == ["bootseer", "bootseer-events"]
        assert main["env"][0]["name"] == "BOOTSEER_EVENTS"
        assert main["command"] == [LAUNCHER, "start", "--", "train", "a b"]
        assert taken_out(new) == raw
    assert done(new, command=("train", "a b")) == new
    assert "\n" in form or json.loads(done(form.format(*["null"] * 5), command=("train",)))


def test_what_was_put_beside_ours_in_place_of_a_null_stays() -> None:
    raw = IN_JSON.format("null", "null", "null", '["x"]', "null")
    new = done(raw).replace('"volumes" : [   ', '"volumes" : [   {"name": "own"}, ')
    new = new.replace('"value": "0.1.0"}', '"value": "0.1.0"}, {"name": "OWN", "value": "1"}')
    assert new.count('"OWN"') == new.count('"own"') == 1
    wanted = raw.replace('"volumes" : null', '"volumes" : [   {"name": "own"}]')
    wanted = wanted.replace('"env":null', '"env":[{"name": "OWN", "value": "1"}]')
    assert json.loads(taken_out(new)) == json.loads(wanted)


def test_a_null_that_a_tool_wrote_anew_becomes_an_empty_list() -> None:
    raw = IN_JSON.format("null", "null", "null", '["x"]', "null")
    bare = json.loads(taken_out(json.dumps(json.loads(done(raw)))))
    assert bare == json.loads(IN_JSON.format("[]", "[]", "[]", '["x"]', "[]"))


@pytest.mark.parametrize("null", ["!!null", "!!null null", "&a null", "&a", "*n"])
def test_a_null_with_a_mark_is_refused(null: str) -> None:
    for form in (IN_BLOCKS, IN_FLOW):
        body = form.format("[]", "[]", null, '["x"]', "[]")
        if form is IN_FLOW:
            body = form.format("[]", "[]", '["x"]', f"{null} ", "[]")
        raw = f"metadata: {{labels: {{a: &n null}}}}\n{body}"
        reason = "env is written once" if null == "*n" else "env is null, which cannot be filled"
        assert reason in refusal(raw)


EXPLICIT = """\
kind: Pod
spec:
  hostNetwork: true
  ? initContainers
  : {0}
  ? volumes # none
  : {1}
  containers:
  - name: a
    ? env

    : {2}
    ? command
    : {3}
    ? volumeMounts
    : {4}
"""


def test_an_empty_null_behind_a_question_mark_is_refused() -> None:
    """What fills it was written between the key and its colon: no YAML any more, exit code 0."""
    names = ("initContainers", "volumes", "env", "command", "volumeMounts")
    asked = Options(command=("train",))
    for name in names:
        raw = EXPLICIT.format(*("" if name == each else "null" for each in names))
        assert f"{name} is null, which cannot be filled here" in refusal(raw, asked)
        bare = raw.replace("\n\n", "\n").splitlines(keepends=True)
        at = next(n for n, line in enumerate(bare) if f"? {name}" in line)
        raw = "".join(bare[: at + 1] + bare[at + 2 :])  # without a colon
        assert f"{name} is null, which cannot be filled here" in refusal(raw, asked)
    for null in ("null", "[]"):
        raw = EXPLICIT.format(*[null] * 5)
        new = done(raw, command=("train",))
        assert pods_of(new)[0]["containers"][0]["command"][3:] == ["train"]
        assert (taken_out(new), done(new, command=("train",))) == (raw, new)


@pytest.mark.parametrize("key", ["? hostNetwork", "?\n    hostNetwork"])
def test_a_first_key_with_a_question_mark_is_no_place_for_others(key: str) -> None:
    """The column of the keys that were added is not that of its letters."""
    body = "\n  : true\n  dnsPolicy: None\n  containers: [{name: a, command: [x]}]\n"
    reason = refusal(f"kind: Pod\nspec:\n  {key}{body}")
    assert "line 3: write the first key without a question mark" in reason


def test_a_command_that_nobody_knows_is_asked_for() -> None:
    def lost(image: str) -> ImageConfig:
        raise NotFoundError(f"the registry x does not have {image}")

    assert "give it by --command" in refusal(BARE)
    assert "does not have repo/i:1; give it by --command" in refusal(BARE, None, lost)
    assert "names no command either" in refusal(BARE, None, lambda _: ImageConfig((), ()))
    (pod,) = pods_of(done(BARE, command=("python", "t.py")))
    assert pod["containers"][0]["command"][3:] == ["python", "t.py"]


# --- arbitrary manifests -------------------------------------------------------------------------

NAMES = st.text("abcdefgh-", min_size=1, max_size=6)
PRINTABLE = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co", "Zl", "Zp"])
SCALARS = st.one_of(st.text(PRINTABLE, max_size=8), st.integers(), st.booleans(), st.none())
EXTRA = st.dictionaries(NAMES, st.recursive(SCALARS, lambda s: st.lists(s, max_size=3)), max_size=3)


@st.composite
def manifests(draw: st.DrawFn) -> str:
    """A pod somewhere in an object, in a style drawn at random."""
    main: dict[str, Any] = {"name": draw(NAMES), "command": draw(st.none() | st.lists(NAMES))}
    if draw(st.booleans()):
        main["args"] = draw(st.none() | st.lists(NAMES, max_size=2))
    main |= {k: v for k, v in draw(EXTRA).items() if k not in main}
    main["image"] = "i"
    if draw(st.booleans()):
        names = draw(st.none() | st.lists(NAMES, max_size=3))
        main["env"] = names and [{"name": n, "value": "v"} for n in names]
    if draw(st.booleans()):
        names = draw(st.none() | st.lists(NAMES))
        main["volumeMounts"] = names and [{"name": n, "mountPath": "/m"} for n in names]
    keys = list(main)
    main = {key: main[key] for key in draw(st.permutations(keys))}
    spec: dict[str, Any] = {"containers": [main], **draw(EXTRA)}
    if draw(st.booleans()):
        names = draw(st.none() | st.lists(NAMES))
        spec["volumes"] = names and [{"name": n, "emptyDir": {}} for n in names]
    if draw(st.booleans()):
        spec["initContainers"] = draw(st.none() | st.just([]))
    spec = {key: spec[key] for key in draw(st.permutations(list(spec)))}
    document: Any = {"kind": "Pod", "metadata": {"name": "n"}, "spec": spec}
    for _ in range(draw(st.integers(0, 2))):
        document = {"kind": "Thing", draw(NAMES): document}
    style = draw(st.sampled_from([False, None, True, "json", "pretty"]))
    if style == "json":
        return json.dumps(document, ensure_ascii=False)
    if style == "pretty":
        return json.dumps(document, indent=draw(st.integers(1, 4)), ensure_ascii=False)
    raw = yaml.safe_dump(
        document,
        default_flow_style=style,
        sort_keys=False,
        indent=draw(st.integers(2, 6)),
        allow_unicode=draw(st.booleans()),
        width=draw(st.sampled_from([20, 80, 1000])),
    )
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    return raw.replace("\n", newline).rstrip("\r\n") if draw(st.booleans()) else raw


@given(manifests())
def test_any_manifest_comes_back_to_the_byte(raw: str) -> None:
    config = ImageConfig(("/entry",), ("$HOME", "it's"))
    result = inject.inject(text(raw), Options(), lambda _: config)
    if not result.refusals:
        before, after = list(yaml.safe_load_all(raw)), list(yaml.safe_load_all(result.raw))
        assert before != after
        (old,), (new,) = pods_of(raw)[0]["containers"], pods_of(result.raw)[0]["containers"]
        words = [*new["command"], *(new.get("args") or [])]
        own = [*(old.get("command") or ["/entry"]), *(old.get("args") or [])]
        if not old.get("command") and not old.get("args"):
            own += ["$$HOME", "it's"]
        assert words == [LAUNCHER, "start", "--", *own]
    assert taken_out(result.raw) == raw
    again = inject.inject(
        dataclasses.replace(text(raw), raw=result.raw), Options(), lambda _: config
    )
    assert again.raw == result.raw
