"""`bootseer k8s check`: which tier each pod of a manifest gets, and why."""

from __future__ import annotations

from typing import Any

import pytest

from bootseer.kubernetes import check, inject, manifest_text
from bootseer.kubernetes.check import Finding
from bootseer.kubernetes.options import Options, Place
from tests.support.samples.manifests import pod_of


def found(raw: str, **options: Any) -> list[Finding]:
    return check.check(manifest_text.decode(raw.encode(), "test"), Options(**options))


@pytest.mark.parametrize(
    ("more", "options", "tier", "why"),
    [
        ("", {}, "none", "not privileged"),
        ("securityContext: {privileged: true}", {}, "privileged", "the container is"),
        ("", {"tier": "privileged"}, "privileged", "--tier privileged"),
        ("resources: {limits: {example.com/fuse: 1}}", {}, "fuse", "example.com/fuse"),
        ("", {"tier": "fuse", "fuse_resource": "a.b/fuse"}, "fuse", "a.b/fuse"),
    ],
)
def test_a_pods_tier_and_its_reason(
    more: str, options: dict[str, Any], tier: str, why: str
) -> None:
    (one,) = found(pod_of(more=more), **options)
    assert (one.tier, one.container, one.refusal, one.injected) == (tier, "main", "", False)
    assert why in one.why
    assert tier in check.ALLOWED


@pytest.mark.parametrize(
    ("added", "noted"), [("[]", True), ("[NET_ADMIN]", True), ("[SYS_ADMIN]", False)]
)
def test_a_device_without_the_right_to_mount_is_noted(added: str, noted: bool) -> None:
    more = f"securityContext: {{capabilities: {{add: {added}}}}}"
    for options in ({"tier": "fuse", "fuse_resource": "a.b/fuse"}, {}):
        (one,) = found(pod_of(more=more), **options)
        expected = noted and bool(options)
        assert any("without the capability SYS_ADMIN" in note for note in one.notes) == expected


def test_what_will_not_work_is_noted() -> None:
    more = "securityContext: {readOnlyRootFilesystem: true}"
    (one,) = found(pod_of(more=more), cache=Place("host", "/c"))
    notes = " / ".join(one.notes)
    for words in ("read-only", "go with it", "host:/DIR is refused"):
        assert words in notes
    (one,) = found(pod_of(), events=Place("claim", "events"))
    assert one.notes == ()


@pytest.mark.parametrize("key", ["hostPID", "shareProcessNamespace"])
def test_a_wrapper_that_is_not_process_1_is_noted(key: str) -> None:
    (one,) = found(f"{pod_of().rstrip()}\n  {key}: true\n", events=Place("claim", "events"))
    (note,) = one.notes
    assert "the wrapper is not process 1" in note


@pytest.mark.parametrize(
    ("metadata", "hint"),
    [
        ("{name: p}", "--command 'Pod/p/main=WORDS'"),
        ("{generateName: p-}", "--command 'Pod/p-/main=WORDS'"),
        ("{}", "--command 'WORDS'"),
        ("{name: '{{x}}'}", "--command 'WORDS'"),
    ],
)
def test_a_hint_at_a_command_can_be_followed(metadata: str, hint: str) -> None:
    raw = pod_of().replace("{name: p}", metadata).replace("    command: [train]\n", "")
    (one,) = found(raw)
    assert one.refusal.endswith(f"give it by {hint}")


def test_pods_of_one_name_are_told_apart() -> None:
    """The second is injected already, the third is refused, and only these."""
    raw = pod_of("same")
    injected = inject.inject(manifest_text.decode(raw.encode(), "test"), Options()).raw
    refused = pod_of("same", "volumeMounts: [{name: a, mountPath: /opt/bootseer}]")
    first, second, third = found("---\n".join((raw, injected, refused)))
    assert [one.injected for one in (first, second, third)] == [False, True, False]
    assert [bool(one.refusal) for one in (first, second, third)] == [False, False, True]
    assert "/opt/bootseer" in third.refusal


def test_a_pod_whose_job_nobody_can_tell_is_refused() -> None:
    two = pod_of().replace("  - name: main", "  - {name: other}\n  - name: main")
    (one,) = found(two)
    assert (one.container, one.tier) == ("", "none")
    assert "several containers (other, main)" in one.refusal


def test_a_train_job_that_cannot_be_edited_is_one_refusal_among_others() -> None:
    job = "kind: TrainJob\nmetadata: {name: t}\nspec:\n  words: &c [a]\n  trainer: {command: *c}\n"
    text = manifest_text.decode(f"{pod_of()}---\n{job}".encode(), "test")
    result = inject.inject(text, Options())
    (refusal,) = result.refusals
    assert (refusal.pod, refusal.line) == ("TrainJob/t", 10)
    assert "alias" in refusal.reason
    assert result.raw.endswith(job)
    assert "bootseer-init" in result.raw
