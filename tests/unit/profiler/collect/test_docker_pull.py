"""`bootseer import docker`: what Docker says of a pull, and of one that fails."""

from __future__ import annotations

from typing import Any

import pytest

from bootseer.errors import AccessDeniedError, NoSpaceError, NotFoundError, StoreUnavailableError
from bootseer.profiler.collect.docker_pull import PullTimes, pull_error

MS = 1_000_000
DIGEST = "sha256:" + "c" * 64


def dockers_words() -> list[tuple[int, dict[str, Any]]]:
    """(milliseconds, line): two layers that travel and one that is there, as Docker tells it."""

    def step(at: int, name: str, status: str, **detail: int) -> tuple[int, dict[str, Any]]:
        return at, {"id": name, "status": status, "progressDetail": detail}

    return [
        (0, {"status": "Pulling from library/x", "id": "1"}),
        step(1, "aa", "Pulling fs layer"),
        step(1, "bb", "Pulling fs layer"),
        step(1, "cc", "Already exists"),
        step(2, "bb", "Waiting"),
        step(10, "aa", "Downloading", current=5, total=1000),
        step(60, "aa", "Verifying Checksum"),
        step(61, "aa", "Download complete"),
        step(62, "bb", "Downloading", current=1, total=50),
        step(70, "aa", "Extracting", current=1, total=1000),
        step(80, "bb", "Download complete"),
        step(100, "aa", "Pull complete"),
        step(130, "bb", "Pull complete"),
        (131, {"status": f"Digest: {DIGEST}"}),
        (131, {"status": "Status: Downloaded newer image for x:1"}),
    ]


def test_dockers_lines_become_downloads_and_extractions() -> None:
    times = PullTimes("x:1", 0)
    for at, line in dockers_words():
        times.take(line, at * MS)
    spans = [
        (s.name, s.attributes.get("container.image.layer"), s.begin_ns // MS, s.end_ns // MS)
        for s in times.spans(140 * MS)
    ]
    assert spans == [
        ("image.pull", None, 0, 140),
        ("image.pull.download", "aa", 10, 60),
        ("image.pull.download", "bb", 62, 80),
        ("image.pull.extract", "aa", 70, 100),
        ("image.pull.extract", "bb", 100, 130),  # told by its end alone: after the one before
    ]
    whole = times.spans(140 * MS)[0].attributes
    assert whole["bootseer.bytes"] == 1050
    assert (whole["bootseer.layers"], whole["bootseer.layers.present"]) == (3, 1)
    assert times.digest == DIGEST
    assert times.not_observed == []


@pytest.mark.parametrize(
    "line",
    [{}, {"id": 5, "status": None}, {"id": "x", "progressDetail": []}, {"status": ["Waiting"]},
     {"id": "x", "status": "Downloading", "progressDetail": {"total": "many"}}],
)  # fmt: skip
def test_lines_of_another_shape_are_borne(line: dict[str, Any]) -> None:
    times = PullTimes("x", 0)
    times.take(line, 5)
    assert times.spans(9)[0].name == "image.pull"
    assert "image.pull.extract" in times.not_observed


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("manifest unknown", NotFoundError),
        ("pull access denied for x, repository does not exist", AccessDeniedError),
        ("write /var/x: no space left on device", NoSpaceError),
        ('Get "https://cdn.io/blob?verify=17-secret%3D": EOF', StoreUnavailableError),
        ("dial tcp: i/o timeout at https://bob:secret@reg.io/?token=secret", StoreUnavailableError),
    ],
)
def test_what_a_program_says_of_a_failure_has_its_class(said: str, kind: type[Exception]) -> None:
    error = pull_error(said, "x:1")
    assert type(error) is kind
    assert "secret" not in str(error)
    times = PullTimes("x:1", 0)
    times.take({"error": said}, 5)
    span = times.spans(9)[0]
    assert (span.status, span.attributes["error.type"]) == ("error", kind.__name__)
