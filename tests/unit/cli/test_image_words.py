"""The words of `image mount` and `image run`: read by hand they mean what click takes them for."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.cli import root
from bootseer.cli.image import direct
from bootseer.cli.image import words as image_words
from bootseer.imageprefetch.mount.settings import MountSettings

TEXTS = ("--workload", "--cache", "--runtime", "--events", "--log-file")
FLAGS = ("--fill", "--no-fill", "--record", "--no-record", "--plain-http", "--hot", "--no-hot")
OTHERS = ("--nosuid", "--loop", "--no-loop", "--json", "--name", "--help", "--deadline")
OTHERS += ("--gpus=1", "--platform", "--platform=linux/arm64")
VALUES = ("a", "/d/e", "x.jsonl", "9", "", "-v/data:/e", "-it", "--env", "-", "host:5/a/b:1")
WORDS = st.lists(
    st.one_of(
        st.sampled_from(TEXTS + FLAGS + OTHERS + VALUES),
        st.tuples(st.sampled_from(TEXTS + FLAGS), st.sampled_from(VALUES)).map("=".join),
    ),
    max_size=7,
)
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(("BOOTSEER_CACHE", "BOOTSEER_RUNTIME", "BOOTSEER_EVENTS", "BOOTSEER_OTHER")),
    st.sampled_from(("", "/from/environment", "/a/file.jsonl")),
)


def by_click(kind: str, words: list[str], environ: dict[str, str]) -> Any:
    """What click hands over to the command; None where it reports an error or prints help."""
    taken: list[Any] = []
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
    with (
        mock.patch.dict(os.environ, {**clean, **environ}, clear=True),
        mock.patch.object(direct, "mount", lambda given: taken.append(given) or 0),
        mock.patch.object(direct, "run", lambda *given: taken.append(given) or 0),
    ):
        root.main(["image", kind, *words])
    return taken[0] if taken else None


def settings_of(fields: dict[str, Any]) -> MountSettings:
    return MountSettings(**{"directory": "", **fields})


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, environ=ENVIRONMENTS)
def test_run_reads_by_hand_what_click_reads(
    capsys: pytest.CaptureFixture[str], words: list[str], environ: dict[str, str]
) -> None:
    for wanted in (words, [*words, "--", "sh", "--cache", "x"]):
        read = image_words.parse_run(wanted, environ)
        if read is not None:
            clicked = by_click("run", wanted, environ)
            assert clicked is not None
            assert read[0].pop("config", "") == clicked[0].pop("config")
            assert settings_of(read[0]) == settings_of(clicked[0])
            assert read[1:] == clicked[1:]
    capsys.readouterr()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, environ=ENVIRONMENTS)
def test_mount_reads_by_hand_what_click_reads(
    capsys: pytest.CaptureFixture[str], words: list[str], environ: dict[str, str]
) -> None:
    for wanted in (words, ["host:5/a:1", *words, "/mnt"]):
        read = image_words.parse_mount(wanted, environ)
        if read is not None:
            clicked = by_click("mount", wanted, environ)
            assert clicked is not None
            assert read.pop("as_json") == clicked.pop("as_json")
            assert settings_of(read) == settings_of(clicked)
    capsys.readouterr()


def test_what_a_job_gives_is_read_by_hand() -> None:
    usual = ["--cache", "/c", "--runtime=/r", "--workload", "w", "h:5/a:1", "/mnt"]
    assert image_words.parse_mount(usual, {"BOOTSEER_EVENTS": "/events"}) == {
        "cache": "/c",
        "runtime": "/r",
        "workload": "w",
        "events_dir": "/events",
        "ref": "h:5/a:1",
        "directory": "/mnt",
        "as_json": False,
        "plain_http": None,
    }
    read = image_words.parse_run(["h:5/a:1", "--gpus", "all", "--", "python", "--cache"], {})
    assert read == (
        {"ref": "h:5/a:1", "plain_http": None},
        ("--gpus", "all"),
        ("python", "--cache"),
    )


@pytest.mark.parametrize("name", ["BOOTSEER_IMAGE_RECORD_WINDOW", "BOOTSEER_IMAGE_HOT"])
def test_variables_for_single_options_are_left_to_click(name: str) -> None:
    assert image_words.parse_mount(["a", "b"], {name: "1"}) is None
    assert image_words.parse_run(["a"], {name: "1"}) is None
