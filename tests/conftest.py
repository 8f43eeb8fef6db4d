"""Which tests run where, and what is said about those that do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CAP_SYS_ADMIN = 21
FAST_SECONDS_NOTE = "test-fast leaves out tests that start servers, mounts or browsers"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bootseer")
    group.addoption("--soak", action="store_true", help="run the long counts, and only them")
    group.addoption("--fast", action="store_true", help=FAST_SECONDS_NOTE)
    group.addoption(
        "--forbid-deselect",
        action="store_true",
        help="fail when a test is left out for want of root or a Debian package",
    )


def has_mount_privilege() -> bool:
    """Root with CAP_SYS_ADMIN: container roots often lack it."""
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak, fast = config.getoption("--soak"), config.getoption("--fast")
    privileged = has_mount_privilege()
    kept, left_out, other = [], [], []
    for item in items:
        needs_machine = any(item.get_closest_marker(m) for m in ("root", "debian"))
        if bool(item.get_closest_marker("soak")) != soak or (
            fast and (needs_machine or item.get_closest_marker("slow"))
        ):
            other.append(item)
        elif needs_machine and not privileged:
            left_out.append(item)
        else:
            kept.append(item)
    items[:] = kept
    if other or left_out:
        config.hook.pytest_deselected(items=other + left_out)
    config.stash[LEFT_OUT] = [item.nodeid for item in left_out]


LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    left_out = session.config.stash.get(LEFT_OUT, [])
    if output is not None:
        output["left_out"] = left_out
    elif left_out and session.config.getoption("--forbid-deselect"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every xdist worker collects all tests, so one worker's list is everybody's."""
    config = node.config  # type: ignore[attr-defined]
    left_out = getattr(node, "workeroutput", {}).get("left_out", [])
    if left_out:
        config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash.get(LEFT_OUT, [])
    if not left_out:
        return
    terminalreporter.section("left out: these need root with CAP_SYS_ADMIN on Debian")
    for nodeid in sorted(left_out):
        terminalreporter.write_line(nodeid)
    terminalreporter.write_line(f"{len(left_out)} tests left out for want of privilege")
