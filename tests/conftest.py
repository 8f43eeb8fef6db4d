"""Which tests run where, and what is said about those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.labs.hdfs import hdfs, hdfs_folder, own_hdfs
from tests.support.labs.kubernetes import api, end_node, init_image, k8s, namespace
from tests.support.labs.podman import podman
from tests.support.labs.registry import own_registry, registry
from tests.support.page_cache import page_cache_stays

__all__ = [
    "api",
    "hdfs",
    "hdfs_folder",
    "init_image",
    "k8s",
    "namespace",
    "own_hdfs",
    "own_registry",
    "page_cache_stays",
    "podman",
    "registry",
]
"""Fixtures that every module may ask for."""

# A loaded machine is slow, not wrong: no test is timed, those of hypothesis included.
settings.register_profile("untimed", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("untimed")

LABS = frozenset(
    ("api", "hdfs", "init_image", "k8s", "own_hdfs", "own_registry", "podman", "registry")
)
"""Fixtures whose servers are made of Debian's packages."""

# Tests serve and call gRPC in this process, and mount from it: in each child that a mount forks,
# gRPC would start threads of its own, for as long as any server or channel here is not collected.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

CAP_SYS_ADMIN = 21
NEEDED_BYTES = 8 << 30
"""Twice what a whole run was seen to keep below the folder of temporary files."""
FAST_NOTE = "leave out tests that need root, a Debian package or a server, or take seconds"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        settings.load_profile("fast")  # before any module of tests is imported
    # A shell in the background, or nohup, starts us deaf to these, and so would be all we start.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or session.config.getoption("--fast"):
        return
    if not session.config.getoption("collectonly"):
        require_space(tempfile.gettempdir())


def require_space(folder: str) -> None:
    """Raise UsageError where the image caches of tests would keep nothing for want of space."""
    from bootseer.blockimage.serve.image_server import KEEP_FREE

    disk = shutil.disk_usage(folder)
    needed = NEEDED_BYTES + int(disk.total * KEEP_FREE)
    if disk.free < needed:
        raise pytest.UsageError(
            f"{folder} has {disk.free >> 20} MiB free, tests need {needed >> 20}: image caches "
            f"leave {KEEP_FREE:.0%} of a disk to others; free space, or set TMPDIR"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bootseer")
    group.addoption("--soak", action="store_true", help="run the long counts, and only them")
    group.addoption("--fast", action="store_true", help=FAST_NOTE)
    group.addoption(
        "--forbid-deselect",
        action="store_true",
        help="fail when any test is deselected: for want of root or a Debian package, by -k, by -m",
    )


@pytest.fixture(autouse=True)
def own_priority() -> Iterator[None]:
    """Code that lowers its thread's priority runs in this one as well; the next test has its own.

    Without the privilege it stays low.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


def has_mount_privilege() -> bool:
    """Root with CAP_SYS_ADMIN: container roots often lack it."""
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test, of another project's suite, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak, fast = config.getoption("--soak"), config.getoption("--fast")
    privileged = has_mount_privilege()
    kept, left_out, other = [], [], []
    for item in items:
        needs_machine = any(item.get_closest_marker(m) for m in ("root", "debian"))
        needs_machine |= not LABS.isdisjoint(getattr(item, "fixturenames", ()))
        if bool(item.get_closest_marker("soak")) != soak:
            continue  # the long counts are a run of their own (`make soak`)
        if fast and (needs_machine or item.get_closest_marker("slow")):
            other.append(item)
        elif needs_machine and not privileged:
            left_out.append(item)
        else:
            kept.append(item)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = spread(kept, workers) if workers > 1 else kept
    config.stash[LEFT_OUT] = [item.nodeid for item in left_out]
    if other or left_out:
        config.hook.pytest_deselected(items=other + left_out)


def pytest_collection_finish() -> None:
    # Every mount that a test makes forks this process: a collection there would copy, page by
    # page, all that six thousand collected tests take.
    gc.collect()
    gc.freeze()


def spread(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests for workers that each begin with an equal part, and later steal from the ends.

    Modules stay whole. Those of Kubernetes begin the first part and those of HDFS the second, so
    that one worker alone starts each of these servers, at once; then come other slow modules, and
    the quick tests, which are what is stolen in the end, last.
    """
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(module_of(item), []).append(item)
    chains: list[list[pytest.Item]] = [[] for _ in range(workers)]
    slow: list[list[pytest.Item]] = []
    quick: list[pytest.Item] = []
    for module in modules.values():
        kinds = [lab_of(item) for item in module]
        if any(kinds):
            chains[(HDFS in kinds) % workers].extend(module)
        elif any(is_slow(item) for item in module):
            slow.append(module)
        else:
            quick += module
    for module in slow:
        min(chains, key=len).extend(module)
    ordered: list[pytest.Item] = []
    for number, chain in enumerate(chains):
        # As the scheduler cuts: what is left, divided by the workers that are left.
        part = (len(items) - len(ordered)) // (workers - number)
        fill = max(part - len(chain), 0)
        ordered += chain + quick[:fill]
        quick = quick[fill:]
    return ordered + quick


def lab_of(item: pytest.Item) -> str:
    """Which of the servers that take long to start a test asks for; "" = none."""
    names = set(getattr(item, "fixturenames", ()))
    if names & {"k8s", "api"}:
        return KUBERNETES
    return HDFS if names & {"hdfs", "own_hdfs"} else ""


def is_slow(item: pytest.Item) -> bool:
    """Whether `--fast` leaves it out."""
    marked = any(item.get_closest_marker(m) for m in ("root", "debian", "slow"))
    return marked or not LABS.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)  # after what the test itself ends
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Kubernetes with the last module in a row that has tests of it."""
    if nextitem is None or module_of(nextitem) not in kubernetes_modules(item.session):
        end_node(item.config)


def kubernetes_modules(session: pytest.Session) -> frozenset[str]:
    """The modules with tests that ask for a node, of all that were collected."""
    stash = session.stash
    if KUBERNETES_MODULES not in stash:
        asking = [item for item in session.items if lab_of(item) == KUBERNETES]
        stash[KUBERNETES_MODULES] = frozenset(map(module_of, asking))
    return stash[KUBERNETES_MODULES]


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


KUBERNETES, HDFS = "kubernetes", "hdfs"
KUBERNETES_MODULES = pytest.StashKey[frozenset[str]]()
LEFT_OUT = pytest.StashKey[list[str]]()
DESELECTED = pytest.StashKey[list[str]]()
"""All that was deselected for whatever reason, `-k` and `-m` included."""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash.setdefault(DESELECTED, []).append(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_node(session.config)  # where the session is cut short
    stash = session.config.stash
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = stash.get(LEFT_OUT, [])
        output["deselected"] = stash.get(DESELECTED, [])
    elif session.config.getoption("--forbid-deselect") and stash.get(DESELECTED, []):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every xdist worker collects all tests, so one worker's lists are everybody's."""
    stash = node.config.stash  # type: ignore[attr-defined]
    output = getattr(node, "workeroutput", {})
    for key, name in ((LEFT_OUT, "left_out"), (DESELECTED, "deselected")):
        if output.get(name):
            stash[key] = output[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    left_out, deselected = config.stash.get(LEFT_OUT, []), config.stash.get(DESELECTED, [])
    if left_out:
        terminalreporter.section("left out: these need root with CAP_SYS_ADMIN on Debian")
        for nodeid in sorted(left_out):
            terminalreporter.write_line(nodeid)
        terminalreporter.write_line(f"{len(left_out)} tests left out for want of privilege")
    if deselected and config.getoption("--forbid-deselect"):
        terminalreporter.section("deselected, and --forbid-deselect allows none", red=True)
        for nodeid in sorted(set(deselected) - set(left_out)):
            terminalreporter.write_line(nodeid)
        terminalreporter.write_line(f"{len(deselected)} tests deselected")
