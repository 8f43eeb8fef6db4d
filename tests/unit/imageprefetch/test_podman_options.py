"""Podman's options, as far as we have to understand them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.imageprefetch.run import podman, podman_options
from bootseer.storage.oci.config import ImageConfig


def test_what_is_shown_in_a_container() -> None:
    options = [
        *("-v", "/a:/x:ro", "--volume=/b:/y", "-v/c:/z"),
        *("--mount", "type=bind,src=/d,dst=/w,ro", "--mount", "type=tmpfs,dst=/t"),
        *("--tmpfs", "/t2:rw", "-v", "named:/n", "-v", "/anonymous"),
    ]
    assert podman_options.bind_mounts(options) == [
        ("/x", "/a"),
        ("/y", "/b"),
        ("/z", "/c"),
        ("/w", "/d"),
    ]


def test_the_last_directory_and_user_count() -> None:
    options = ["--workdir", "/a", "-w=/b", "--user=1", "-u", "2:3"]
    assert (podman_options.working_directory(options), podman_options.user(options)) == (
        "/b",
        "2:3",
    )
    assert (podman_options.working_directory(["-w/c"]), podman_options.user(["-u4"])) == ("/c", "4")
    assert (podman_options.working_directory([]), podman_options.user([])) == ("", "")


def test_variables_of_options_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").write_text("A=file\n# B=no\nC=file\n")
    monkeypatch.setenv("MINE", "from here")
    monkeypatch.delenv("NONE", raising=False)
    options = ["--env-file", f"{tmp_path}/env", "-e", "A=1", "--env=MINE", "--env", "NONE", "-eD=2"]
    assert podman_options.given_variables(options) == {
        "A": "1",
        "C": "file",
        "MINE": "from here",
        "D": "2",
    }


def test_a_container_that_runs_ahead_has_no_name_or_terminal() -> None:
    options = ["--name", "job", "-it", "--publish=80:80", "-v", "/a:/b", "--gpus", "all", "-i"]
    options += ["--replace", "-p8080:80"]
    assert podman_options.helper_options(options) == ["-v", "/a:/b", "--gpus", "all"]


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        (["-v", "/a:/b", "--mount", "type=bind,src=/c,dst=/d", "-e", "A=*"], ""),
        (["--tmpfs", "/tmp"], ""),
        (["--tmpfs", "/venv"], "--tmpfs /venv"),
        (["-v", "named:/b"], "-v named:/b"),
        (["-v/anonymous"], "-v /anonymous"),
        (["--mount", "type=volume,src=x,dst=/d"], "--mount type=volume,src=x,dst=/d"),
        (["--volumes-from=other"], "--volumes-from=other"),
        (["--env", "PIP_*"], "--env PIP_*"),
        (["--env-host"], "--env-host"),
    ],
)
def test_what_a_container_is_shown_that_we_do_not_know(options: list[str], unknown: str) -> None:
    assert podman_options.find_unknown(options, lambda place: place == "/tmp") == unknown


def test_an_installs_volumes_are_read_only() -> None:
    options = ["-v", "/a:/x", "-v/b:/y:rw,Z", "--volume=/c:/cache", "--gpus", "all"]
    options += ["--mount", "type=bind,src=/d,dst=/w,rw", "--tmpfs", "/tmp"]
    assert podman_options.with_fixed_volumes(options, lambda place: place == "/cache") == [
        *("-v", "/a:/x:ro", "-v", "/b:/y:Z,ro", "--volume", "/c:/cache", "--gpus", "all"),
        *("--mount", "type=bind,src=/d,dst=/w,ro=true", "--tmpfs", "/tmp"),
    ]


def test_what_a_pull_is_told() -> None:
    options = ["--authfile", "/a", "--tls-verify=false", "--platform=linux/arm64", "--gpus", "all"]
    assert sorted(podman_options.pull_options(options)) == sorted(
        ["--tls-verify=false", "--authfile", "/a", "--platform", "linux/arm64"]
    )
    for policy, always in (("always", True), ("newer", True), ("missing", False), ("never", False)):
        assert podman_options.always_pulls([f"--pull={policy}"]) is always
        assert podman_options.always_pulls(["--pull", policy]) is always
    assert not podman_options.always_pulls([])


@pytest.mark.parametrize(
    ("options", "words", "program"),
    [
        ([], [], ["entry", "cmd"]),
        ([], ["own"], ["entry", "own"]),
        (["--entrypoint", "/bin/x"], ["own"], ["/bin/x", "own"]),
        (["--entrypoint=/bin/x"], [], ["/bin/x"]),
        (["--entrypoint", '["/bin/x", "-a"]'], ["b"], ["/bin/x", "-a", "b"]),
        (["--entrypoint", ""], ["own"], ["own"]),
    ],
)
def test_the_program_that_a_container_runs(
    options: list[str], words: list[str], program: list[str]
) -> None:
    assert podman.program_of(["entry"], ["cmd"], options, words) == program


def test_no_program_is_refused() -> None:
    with pytest.raises(UsageError, match="give one after --"):
        podman.program_of([], [], [], [])


def test_a_line_of_a_shell_ahead_of_the_program() -> None:
    config = ImageConfig(entrypoint=("entry",), cmd=("cmd",))
    line = podman.container_words(
        "/tree", config, ["--entrypoint", "/bin/x"], ["a"], before="make it"
    )
    assert line[line.index("--rootfs") :] == [
        *("--rootfs", "/tree:O", "/bin/sh", "-c", 'make it && exec "$@"', "sh", "/bin/x", "a"),
    ]
    assert "--entrypoint" not in line
    rooted = podman.container_words("/tree", config, [], [], root="/root-of-it")
    assert rooted[-4:] == ["--rootfs", "/root-of-it", "entry", "cmd"]
