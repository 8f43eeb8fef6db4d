"""The words of `deps run`: read by hand they mean what click takes them for."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.cli import root
from bootseer.cli.deps import direct, group

OPTIONS = tuple(
    option for parameter in group.run_command.params for option in parameter.opts if "-" in option
)
VALUES = ("a", "/d/e", "9", "0.5", "-1", "nan", "", "auto", "copy", "inline", "--", "-x", "--json")
WORDS = st.lists(
    st.one_of(
        st.sampled_from(OPTIONS + VALUES + ("--help", "-h", "pip", "install")),
        st.tuples(st.sampled_from(OPTIONS), st.sampled_from(VALUES)).map("=".join),
    ),
    max_size=7,
)
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(
        (
            *("BOOTSEER_CACHE", "BOOTSEER_STORE", "BOOTSEER_EVENTS", "BOOTSEER_SIGN_KEY"),
            *("BOOTSEER_DEPS_RUN_FORM", "BOOTSEER_DEPS_RUN_STORE", "BOOTSEER_OTHER"),
        )
    ),
    st.sampled_from(("", "/from/environment", "copy")),
)


def by_click(words: list[str], environ: dict[str, str]) -> Any:
    """What click hands over to the command; None where it reports an error or prints help."""
    taken: list[Any] = []
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
    with (
        mock.patch.dict(os.environ, {**clean, **environ}, clear=True),
        mock.patch.object(direct, "run", lambda **given: taken.append(given) or 0),
    ):
        root.main(["deps", "run", *words])
    return taken[0] if taken else None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, environ=ENVIRONMENTS)
def test_it_reads_by_hand_what_click_reads(
    capsys: pytest.CaptureFixture[str], words: list[str], environ: dict[str, str]
) -> None:
    for wanted in (words, [*words, "--", "pip", "--store", "x"], [*words, "pip", "--cache", "x"]):
        read = direct.parse_run(wanted, environ)
        if read is not None:
            assert by_click(wanted, environ) == read
    capsys.readouterr()


def test_what_a_job_gives_is_read_by_hand() -> None:
    usual = [
        "--store",
        "/s",
        "--cache=/c",
        "--key-file",
        "a",
        "--key-file",
        "b",
        "--max-age",
        "2.5",
    ]
    usual += ["--form", "copy", "--read-only", "--", "pip", "install", "-r", "a"]
    read = direct.parse_run(usual, {"BOOTSEER_EVENTS": "/events", "BOOTSEER_STORE": "/other"})
    assert read == {
        **direct.DEFAULTS,
        "store": "/s",
        "cache": "/c",
        "events": "/events",
        "key_files": ("a", "b"),
        "max_age": 2.5,
        "form": "copy",
        "read_only": True,
        "install": ("pip", "install", "-r", "a"),
    }


def test_every_default_is_the_click_commands() -> None:
    told = by_click(["pip", "install", "six"], {})
    assert told == {**direct.DEFAULTS, "install": ("pip", "install", "six")}


@pytest.mark.parametrize(
    "words", [["--help"], ["--wait"], ["--form", "no", "x"], ["--max-age", "-1", "x"], ["--"], []]
)
def test_click_says_what_is_wrong(words: list[str]) -> None:
    assert direct.parse_run(words, {}) is None
