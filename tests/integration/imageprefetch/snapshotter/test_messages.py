"""The messages on the wire against containerd's own description."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.imageprefetch.snapshotter import messages

PROTO = "/usr/share/gocode/src/github.com/containerd/containerd/api/services/snapshots/v1"


@pytest.mark.debian("golang-github-containerd-containerd-dev")
def test_messages_are_those_of_containerds_own_description() -> None:
    """The protocol description that Debian ships, read as text: the same fields and numbers."""
    import re

    text = Path(PROTO, "snapshots.proto").read_text(encoding="utf-8")
    described = {}
    for name, body in re.findall(r"^message (\w+) ?\{(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        fields = re.findall(r"^\s*[\w.<>, ]+ (\w+)\s*= (\d+)", body, re.MULTILINE)
        described[name] = {field: int(number) for field, number in fields}
    types = messages.messages()
    assert len(described) > 15
    for name, fields in described.items():
        ours = getattr(types, name).DESCRIPTOR
        assert {field.name: field.number for field in ours.fields} == fields
