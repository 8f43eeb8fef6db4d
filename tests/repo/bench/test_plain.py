"""Every case of the bench of plain ways does the same work on both sides; nothing is timed."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import floors, harness, plain

pytestmark = pytest.mark.slow

QUICK = harness.Options(quick=True, runs=1)
IMAGES = ["image tiny", "image tiny mount", "image tiny record", "image registry hanging"]
OTHERS = [case for case in plain.CASES if not case.startswith("image")]
NEEDS = {
    "checkpoint tiny": pytest.mark.debian("curl"),
    "checkpoint tiny cat": pytest.mark.debian("curl"),
    "checkpoint tiny mount": pytest.mark.root,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is mounted where the bench works shall be this test's own, and no other process's.

    Podman takes short paths alone.
    """
    with tempfile.TemporaryDirectory(prefix="bsb-", dir="/var/tmp") as folder:
        monkeypatch.setattr(plain, "CACHE", Path(folder))
        # Dropping the page cache would slow down every test beside this one, and take from others
        # what they see to have come into memory.
        monkeypatch.setattr(plain, "cold", lambda folders: None)
        yield


def measured(case: str) -> None:
    kept: list[harness.Case] = []
    done = plain.measure(QUICK, [case], kept.extend)
    assert kept == done
    assert [(c.case, c.side, len(c.values)) for c in done] == [
        (case, harness.OURS, 1),
        (case, plain.PLAIN, 1),
    ]
    assert str(Path(plain.CACHE)) not in Path("/proc/mounts").read_text()


@pytest.mark.parametrize("case", [pytest.param(case, marks=NEEDS.get(case, ())) for case in OTHERS])
def test_both_sides_do_their_work(case: str) -> None:
    measured(case)


@pytest.mark.root
@pytest.mark.debian("podman")
@pytest.mark.debian("docker-registry")
@pytest.mark.debian("busybox-static")
@pytest.mark.parametrize("case", IMAGES)
def test_both_sides_run_the_image(case: str) -> None:
    measured(case)


def test_a_fault_that_nobody_met_gives_no_figure() -> None:
    with plain.BadServer("slow") as bad:
        with pytest.raises(RuntimeError, match="nobody asked the server that is slow"):
            bad.strike(lambda: 1.0)

        def ask() -> float:
            with socket.create_connection(("127.0.0.1", bad.port)) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert connection.recv(1) == b"H"
            return 2.0

        assert bad.strike(ask) == 2.0
    with plain.BadServer("gone") as gone:
        assert gone.strike(lambda: 3.0) == 3.0


def figures(case: str, ours: list[float], peers: list[float]) -> list[harness.Case]:
    return harness.cases_of(case, {"ours": ours, "plain": peers}, unit="s")


@pytest.mark.parametrize(
    ("case", "ours", "peers", "verdict"),
    [
        ("deps tiny install", [1.2, 1.3], [1.0, 1.0], "held"),
        ("deps tiny install", [1.4, 1.3], [1.0, 1.0], "MISSED"),
        ("deps first start", [10.3], [10.0], "held"),
        ("deps first start", [10.35], [10.0], "MISSED"),
        ("deps store gone", [6.0], [1.0], "held"),
        ("deps store gone", [6.1], [1.0], "MISSED"),
        ("deps store gone", [110.0], [100.0], "held"),
        ("deps store gone", [], [], "not measured"),
    ],
)
def test_what_ours_may_take_longer(
    case: str, ours: list[float], peers: list[float], verdict: str
) -> None:
    (floor,) = [floor for floor in floors.FLOORS["plain"] if floor.case == case]
    assert floor.verdict(figures(case, ours, peers)) == verdict


def test_each_case_that_replaces_a_start_has_its_floor() -> None:
    """The bare wrapper has its own, elsewhere; a recording replaces none."""
    without = {"run", "image tiny record"}
    assert {floor.case for floor in floors.FLOORS["plain"]} == set(plain.CASES) - without
