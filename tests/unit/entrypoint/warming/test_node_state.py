"""How ready a node is, and the exit code that says so."""

from __future__ import annotations

from bootseer.entrypoint.warming.node_state import NOT_READY, NodeState, PartState
from bootseer.errors import NotFoundError


def test_a_node_is_ready_where_all_its_parts_are() -> None:
    image = PartState("image", "i", ready=True)
    deps = PartState("deps", "d", ready=False, present_bytes=1, total_bytes=2)
    missing = PartState.failed("checkpoint", "c", NotFoundError("there is no c; look"))
    broken = PartState.failed("image", "i", OSError(5, "Input/output error"))
    assert (NodeState.of([image]).ready, NodeState.of([image]).exit_code) == (True, 0)
    assert NodeState.of([image, deps]).exit_code == NOT_READY
    assert NodeState.of([image, deps, missing]).exit_code == NotFoundError.exit_code
    assert NodeState.of([broken]).exit_code == NOT_READY
    document = NodeState.of([image, missing]).as_document()
    assert document["ready"] is False
    assert document["parts"] == [
        {
            "part": "image",
            "name": "i",
            "ready": True,
            "present_bytes": 0,
            "total_bytes": 0,
            "reason": "",
            "exit_code": 0,
        },
        {
            "part": "checkpoint",
            "name": "c",
            "ready": False,
            "present_bytes": 0,
            "total_bytes": 0,
            "reason": "there is no c; look",
            "exit_code": 3,
        },
    ]
