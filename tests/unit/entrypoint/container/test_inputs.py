"""What a container's inputs are planned to be, by the settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.config.loading import Loaded, load_tolerantly
from bootseer.entrypoint.container.inputs import (
    NOT_BY_COPY,
    join_commands,
    plan_inputs,
    plan_plainly,
)

ON_NODE = "/run/c/checkpoint"


def loaded(folder: Path, text: str) -> Loaded:
    path = folder / "bootseer.toml"
    path.write_text(text)
    return load_tolerantly(str(path), {})


def test_a_checkpoint_is_mounted_on_the_node_for_any_user(tmp_path: Path) -> None:
    text = '[checkpoint]\nurl = "file:///s/m.pt"\nto = "/ckpt"\nload = "cp /s/m.pt /ckpt"\n'
    plan = plan_inputs(loaded(tmp_path, text), ON_NODE)
    assert plan.checkpoint is not None
    assert plan.checkpoint.request is not None
    assert (plan.checkpoint.request["to"], plan.checkpoint.request["allow_other"]) == (
        ON_NODE,
        True,
    )
    # Its plain way is in the container, and not on the node.
    assert plan.checkpoint.plain == ()
    assert (plan.checkpoint_to, plan.checkpoint_load) == ("/ckpt", ("cp", "/s/m.pt", "/ckpt"))
    assert plan.plain == ()


def test_what_is_switched_off_goes_the_plain_way(tmp_path: Path) -> None:
    text = """
[checkpoint]
enabled = false
url = "file:///s"
to = "/ckpt"
load = "get it"
[deps]
enabled = false
install = "pip install numpy"
"""
    plan = plan_inputs(loaded(tmp_path, text), ON_NODE)
    assert plan.checkpoint is None
    assert plan.plain == ((("get", "it"), ""),)
    assert (plan.install, plan.layered) == (("pip", "install", "numpy"), False)
    assert plan.install_reason == ""


def test_settings_that_cannot_be_read_go_the_plain_way_with_the_reason(tmp_path: Path) -> None:
    text = """
[checkpoint]
url = "file:///s"
to = "/ckpt"
load = "get it"
memory_mib = "much"
[deps]
install = "pip install numpy"
wait = "perhaps"
"""
    plan = plan_inputs(loaded(tmp_path, text), ON_NODE)
    assert plan.checkpoint is None
    ((load, reason),) = plan.plain
    assert load == ("get", "it")
    assert "memory_mib" in reason
    assert not plan.layered
    assert "wait" in plan.install_reason


def test_without_a_plain_way_the_reason_is_kept(tmp_path: Path) -> None:
    plan = plan_inputs(loaded(tmp_path, '[checkpoint]\nurl = "file:///s"\n'), ON_NODE)
    assert plan.checkpoint is not None
    assert (plan.checkpoint.request, plan.checkpoint.reason) == (
        None,
        "[checkpoint] needs both url and to",
    )


def test_a_copy_is_not_made_on_the_node(tmp_path: Path) -> None:
    text = '[checkpoint]\nurl = "file:///s"\nto = "/c"\nform = "copy"\nload = "get it"\n'
    plan = plan_inputs(loaded(tmp_path, text), ON_NODE)
    assert plan.checkpoint is None
    assert plan.plain == ((("get", "it"), NOT_BY_COPY),)


@pytest.mark.parametrize(
    ("to", "taken", "reason"),
    [
        ("/ckpt", ["/data"], ""),
        ("/ckpt", ["/ckpt/"], "already"),
        ("ckpt", [], "begin it with /"),
        ("/c:kpt", [], "begin it with /"),
    ],
)
def test_a_place_that_podman_would_refuse_goes_the_plain_way(
    tmp_path: Path, to: str, taken: list[str], reason: str
) -> None:
    text = f'[checkpoint]\nurl = "file:///s"\nto = "{to}"\nload = "get it"\n'
    plan = plan_inputs(loaded(tmp_path, text), ON_NODE, taken)
    assert (plan.checkpoint is None) == bool(reason)
    assert all(command == ("get", "it") and reason in why for command, why in plan.plain)
    assert len(plan.plain) == bool(reason)


def test_a_fault_of_ours_leaves_the_plain_commands(tmp_path: Path) -> None:
    text = '[checkpoint]\nurl = "file:///s"\nto = "/c"\nload = "get it"\n'
    text += '[deps]\ninstall = "pip install numpy"\n'
    plan = plan_plainly(loaded(tmp_path, text), "because")
    assert (plan.checkpoint, plan.layered, plan.install_reason) == (None, False, "because")
    assert plan.install == ("pip", "install", "numpy")
    assert plan.plain == ((("get", "it"), "because"),)


def test_nothing_is_asked_for(tmp_path: Path) -> None:
    plan = plan_inputs(loaded(tmp_path, "[job]\nuid = 'x'\n"), ON_NODE)
    assert (plan.checkpoint, plan.install, plan.plain) == (None, (), ())


def test_commands_are_one_line_of_a_shell() -> None:
    line = join_commands([("pip", "install", "a b"), ("sh", "-c", "echo $X")])
    assert line == "pip install 'a b' && sh -c 'echo $X'"
    assert join_commands([]) == ""
