"""A start of which only its image's files are asked: no settings are read before the job."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.config.sections import ImageSettings
from bootseer.entrypoint import start_image_only
from bootseer.entrypoint.parts.image_part import _build_request
from bootseer.imageprefetch.filemode.background_recorder import StartSettings
from bootseer.storage.options import StoreOptions

PLAIN = '# ours\n[image]\ntraces = "/shared/t"\r\nworkload="train"\n\n  record = "never"\n'


def asked(text: str, path: Path, **environ: str) -> dict[str, str] | None:
    file = path / "settings.toml"
    file.write_text(text, encoding="utf-8")
    return start_image_only.read_plain_request(str(file), environ)


def test_plain_settings_are_taken_as_the_whole_reader_takes_them(tmp_path: Path) -> None:
    request = asked(PLAIN, tmp_path)
    assert request == {"place": "/shared/t", "workload": "train", "record": "never"}
    whole = _build_request(ImageSettings(traces="/shared/t", workload="train", record="never"))
    given = StartSettings(**whole)  # type: ignore[arg-type]
    short = StartSettings(**request)  # type: ignore[arg-type]
    assert StoreOptions(**(given.options or {})) == StoreOptions()  # type: ignore[arg-type]
    assert dataclasses.replace(given, options=None) == short


@pytest.mark.parametrize(
    "text",
    [
        "",
        'traces = "/t"\n',
        '[image]\ntraces = "/t"\n[deps]\nstore = "/s"\n',
        '[image]\ntraces = "/t"\n[job]\nuid = "7"\n',
        '[image]\ntraces = "/t"\nwindow_s = 3\n',
        '[image]\ntraces = "/t"\npaths = ["/opt"]\n',
        '[image]\ntraces = "/t"\nrecord = "sometimes"\n',
        '[image]\ntraces = "/t" # ours\n',
        '[image]\ntraces = "/\\u0041"\n',
        "[image]\ntraces = '/t'\n",
        '[image]\ntraces = "/t"\ntraces = "/u"\n',
        '[image]\n[image]\ntraces = "/t"\n',
        '[image]\ntraces = "/ä"\n',
        '[image]\ntraces = "/\x01"\n',
        '[image]\ntraces = """/t"""\n',
        '[image]\nworkload = "w"\n',
        '[image]\ntraces = "/t"\nimage\n',
        '[image]\ntraces = "/t"\n#' + "x" * (1 << 16),
    ],
)
def test_whatever_is_not_plain_is_read_in_full(tmp_path: Path, text: str) -> None:
    assert asked(text, tmp_path) is None


def test_variables_that_may_ask_for_more_have_the_settings_read_in_full(tmp_path: Path) -> None:
    assert asked(PLAIN, tmp_path, BOOTSEER_IMAGE_WORKLOAD="other") is None
    assert asked(PLAIN, tmp_path, BOOTSEER_DEPS_STORE="/s") is None
    assert asked(PLAIN, tmp_path, BOOTSEER_EVENTS="/e", BOOTSEER_CONFIG="x", PATH="/bin")
    assert asked("[image]\n", tmp_path) == {}
    assert start_image_only.read_plain_request(str(tmp_path / "none"), {}) is None


def loaded_by(tmp_path: Path, settings: str) -> set[str]:
    """Modules that a start had loaded when it became the job."""
    file = tmp_path / "bootseer.toml"
    file.write_text(settings, encoding="utf-8")
    code = """
import os, sys
from bootseer import __main__ as main
def become(*words):
    print("\\n".join(sys.modules)); sys.stdout.flush(); os._exit(0)
os.execvpe = become
main.main(["start", "--", "true"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_start_of_the_image_alone_loads_neither_settings_nor_parts(tmp_path: Path) -> None:
    heavy = {
        "tomllib",
        "bootseer.config.sections",
        "bootseer.config.loading",
        "bootseer.entrypoint.start",
    }
    traces = f'[image]\ntraces = "{tmp_path}/traces"\nrecord = "never"\n'
    assert not heavy & loaded_by(tmp_path, traces)
    assert heavy <= loaded_by(tmp_path, traces + "share = 0.5\n")


def test_where_no_process_can_be_made_the_job_starts_all_the_same(
    tmp_path: Path,
) -> None:
    """Fault injection: fork refuses."""
    (tmp_path / "bootseer.toml").write_text('[image]\ntraces = "/t"\n', encoding="utf-8")
    code = """
import os, sys
from bootseer import __main__ as main
def refused(): raise OSError(11, "Resource temporarily unavailable")
os.fork = refused
main.main(["start", "--events", sys.argv[1], "--", "echo", "started"])
"""
    events = tmp_path / "events"
    done = subprocess.run(
        [sys.executable, "-c", code, events],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "started\n"
    told = "".join(path.read_text(encoding="utf-8") for path in events.glob("*.jsonl"))
    assert "could not be started: Resource temporarily unavailable" in told
