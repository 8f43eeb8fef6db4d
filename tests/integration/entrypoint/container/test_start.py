"""`bootseer image run --config`: containers whose inputs are brought beside their image."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bootseer.blocks.link_turns import HOT, LinkTurns
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.system.processes import children_of
from tests.support.labs.containers import LARGE, SUM, WAIT, ContainerLab, checkpoint, deps, times
from tests.support.mounts.images import begun_with
from tests.support.processes import command_name
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

# --- the checkpoint -------------------------------------------------------------------------------


def test_a_checkpoint_is_there_and_was_fetched_ahead(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(checkpoint(lab))
    out, _ = lab.run(ref, "sha256sum", "/ckpt/model.pt")
    assert out == SUM
    (load,) = lab.ends("checkpoint.load")
    assert (load["status"], load["attributes"]["bootseer.form"]) == ("ok", "mount")
    (ahead,) = lab.ends("checkpoint.prefetch")
    assert (ahead["status"], ahead["attributes"]["bootseer.bytes"]) == ("ok", len(LARGE))


def test_it_is_fetched_after_what_the_image_needs(lab: ContainerLab) -> None:
    """Its server sees what the node's image servers announce, and waits meanwhile."""
    ref = lab.publish()
    lab.configure(checkpoint(lab))
    words = lab.words(ref, "sh", "-c", "echo ready; while ! test -e /log/end; do sleep 0.1; done")
    with contextlib.ExitStack() as stack:
        turns = stack.enter_context(LinkTurns.of(str(lab.runtime)))
        with turns.holding(HOT):
            start = subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True)
            child = stack.enter_context(start)
            stack.callback((lab.log / "end").touch)
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(1.5)  # what it would need without a wait is a tenth of that
            assert lab.ends("checkpoint.prefetch") == []
        until(lambda: lab.ends("checkpoint.prefetch"), "it is fetched", limit_s=20)
    (ahead,) = lab.ends("checkpoint.prefetch")
    assert (ahead["status"], ahead["attributes"]["bootseer.bytes"]) == ("ok", len(LARGE))


def test_any_user_of_the_container_reads_it(lab: ContainerLab) -> None:
    ref = lab.publish(config={"User": "bob"})
    lab.configure(checkpoint(lab))
    out, _ = lab.run(ref, "sh", "-c", "id -u; sha256sum /ckpt/model.pt")
    assert out == f"1234\n{SUM}"


def test_all_events_are_of_one_start(lab: ContainerLab) -> None:
    """Those of the image's server, the checkpoint's, and of the job itself."""
    ref = lab.publish()
    lab.configure(checkpoint(lab) + '[job]\nuid = "job-7"\nattempt = 2\n')
    out, _ = lab.run(ref, "env")
    variables = dict(line.split("=", 1) for line in out.splitlines())
    assert (variables["BOOTSEER_JOB_UID"], variables["BOOTSEER_ATTEMPT"]) == ("job-7", "2")
    trace = variables["BOOTSEER_TRACEPARENT"].split("-")[1]
    lines = lab.written()
    assert {event["trace_id"] for event in lines} == {trace}
    assert {"image.mount", "checkpoint.load", "start"} <= {event["name"] for event in lines}


def test_without_a_store_its_plain_command_runs_in_the_container(lab: ContainerLab) -> None:
    ref = lab.publish()
    url = f"file://{lab.folder}/nowhere/model.pt"
    load = "load = ['sh', '-c', 'echo loading; mkdir /ckpt; echo plain > /ckpt/model.pt']"
    lab.configure(f'[checkpoint]\nurl = "{url}"\nto = "/ckpt"\n{load}\n')
    out, error = lab.run(ref, "cat", "/ckpt/model.pt")
    assert out == "loading\nplain\n"
    assert "checkpoint: " in error
    assert "going on the plain way" in error
    assert [event["status"] for event in lab.ends("checkpoint.load")].count("fallback") == 1


def test_without_a_store_or_a_plain_command_the_job_starts_all_the_same(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(f'[checkpoint]\nurl = "file://{lab.folder}/nowhere"\nto = "/ckpt"\n')
    out, error = lab.run(ref, "echo", "job")
    assert out == "job\n"
    assert "checkpoint: " in error


def test_a_load_that_fails_ends_the_start_with_its_exit_code(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure('[checkpoint]\nenabled = false\nload = ["sh", "-c", "exit 7"]\n')
    out, _ = lab.run(ref, "echo", "job", code=7)
    assert out == ""


def test_an_image_that_cannot_be_mounted_is_pulled_with_all_its_inputs(lab: ContainerLab) -> None:
    ref = lab.publish(block_image=False, config={"Entrypoint": ["echo", "entry"], "Cmd": ["cmd"]})
    deps = "[deps]\ninstall = ['sh', '-c', 'echo installing']\n"
    lab.configure(checkpoint(lab) + deps)
    out, error = lab.run(ref)
    assert out == "installing\nentry cmd\n"
    assert "podman pulls the image" in error
    out, _ = lab.run(ref, "/ckpt/model.pt", options=("--entrypoint", "sha256sum"))
    assert out == f"installing\n{SUM}"


# --- dependencies ---------------------------------------------------------------------------------

SHOW = "cat /opt/new; ls /opt /opt/old"
SHOWN = "new\n/opt:\nnew\nold\n\n/opt/old:\ny\n"


def test_one_start_installs_and_all_others_mount_its_result(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab))
    out, error = lab.run(ref, "sh", "-c", f"{SHOW}; touch /opt/of-the-job")
    assert (out, "plain way" in error) == (SHOWN, False)
    lab.await_layers(ref)
    for _ in range(2):
        out, _ = lab.run(ref, "sh", "-c", f"{SHOW}; touch /opt/of-the-job")
        assert out == SHOWN
    assert times(lab) == 1
    forms = [event["attributes"]["bootseer.form"] for event in lab.ends("deps.install")]
    assert forms == ["install", "layer", "layer"]
    assert {event["status"] for event in lab.ends("deps.install")} == {"ok"}
    assert {event["status"] for event in lab.written()} == {"ok"}


def test_another_node_mounts_it_too(lab: ContainerLab, tmp_path: Path) -> None:
    ref = lab.publish()
    lab.configure(deps(lab))
    lab.run(ref, "echo", "job")
    lab.await_layers(ref)
    other = {"BOOTSEER_CACHE": f"{tmp_path}/cache2", "BOOTSEER_RUNTIME": f"{tmp_path}/run2"}
    lab.environment |= other
    out, _ = lab.run(ref, "sh", "-c", SHOW)
    assert (out, times(lab)) == (SHOWN, 1)
    until(lambda: not begun_with(f"BOOTSEER_RUNTIME={tmp_path}/run2"), "its servers have ended")


def test_other_inputs_are_installed_again(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab))
    lab.run(ref, "echo", "job")
    lab.await_layers(ref)
    (lab.log / "list.txt").write_text("x==2\n")
    lab.run(ref, "echo", "job")
    lab.await_layers(ref, 2)
    assert times(lab) == 2


def test_an_install_that_fails_ends_the_start_and_publishes_nothing(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab, "echo failing; exit 9"))
    out, _ = lab.run(ref, "echo", "job", code=9)
    assert out == "failing\nfailing\n"  # for the layer, and then plainly
    event, plain = lab.ends("deps.install")
    assert (event["status"], event["attributes"]["process.exit.code"]) == ("error", 9)
    assert plain["status"] == "fallback"
    assert "ended with exit code 9" in plain["attributes"]["bootseer.reason"]
    assert lab.tags(ref) == []


def test_an_install_that_changes_nothing_is_not_run_again(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab, "touch /tmp/x; echo once >> /log/times"))
    for _ in range(2):
        lab.run(ref, "echo", "job")
        lab.await_layers(ref)
    assert times(lab) == 1
    forms = [event["attributes"]["bootseer.form"] for event in lab.ends("deps.install")]
    assert forms == ["install", "layer"]


def test_a_command_whose_inputs_are_not_known_runs_plainly(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure('[deps]\ninstall = ["sh", "-c", "echo x > /opt/new"]\n')
    out, error = lab.run(ref, "cat", "/opt/new")
    assert out == "x\n"
    assert "key_files" in error
    (event,) = lab.ends("deps.install")
    assert (event["status"], event["attributes"]["bootseer.form"]) == ("fallback", "install")
    assert lab.tags(ref) == []


def test_a_container_goes_on_when_its_command_is_killed(lab: ContainerLab) -> None:
    """Nothing that it uses is removed by the next start."""
    ref = lab.publish()
    lab.configure(checkpoint(lab) + deps(lab))
    job = (
        WAIT + "cat /opt/new /opt/old/y > /log/seen; echo own > /opt/own; cat /opt/own >> /log/seen"
    )
    words = lab.words(ref, "sh", "-c", job)
    with subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.kill()
    lab.run(ref, "echo", "another start, which sweeps")
    (lab.log / "go").touch()
    seen = lab.log / "seen"
    until(lambda: seen.exists() and seen.read_text().endswith("own\n"), "the container went on")
    assert seen.read_text() == "new\ny\nown\n"
    lab.await_layers(ref)
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_a_container_goes_on_when_its_podman_is_killed(lab: ContainerLab) -> None:
    """What it has written is its own until it ends, and is then swept."""
    ref = lab.publish()
    lab.configure(deps(lab))
    lab.run(ref, "echo", "so that there is a layer")
    lab.await_layers(ref)
    job = f"echo kept > /opt/written; {WAIT} cat /opt/new /opt/written > /log/result"
    with lab.begun(ref, job) as first:
        (podman,) = (
            process for process in children_of(first.pid) if command_name(process) == "podman"
        )
        os.kill(podman, signal.SIGKILL)
        assert first.wait(60) == 128 + signal.SIGKILL
    result = lab.log / "result"
    until(lambda: result.exists() and result.read_text() == "new\nkept\n", "the job has ended")
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_a_namespace_that_somebody_makes_meanwhile_keeps_no_folder(lab: ContainerLab) -> None:
    """It has a copy of all mounts, as that of any container has while it is made."""
    ref = lab.publish()
    lab.configure(deps(lab))
    sleep = ["unshare", "--mount", "sleep", "infinity"]
    with lab.begun(ref, WAIT) as first, subprocess.Popen(sleep) as other:
        try:
            mounts = Path(f"/proc/{other.pid}/mountinfo")
            until(lambda: "sleep" in command_name(other.pid), "it is made")
            assert f"{lab.cache}/containers" in mounts.read_text()
            (lab.log / "go").touch()
            assert first.wait(60) == 0
            until(lambda: lab.ends("deps.publish"), "the layer is published")
            until(lambda: not lab.left(), "nothing is left")
        finally:
            other.kill()


def test_a_signal_ends_the_install_and_leaves_nothing(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab, "trap 'exit 143' TERM; echo begun > /log/begun; sleep 60 & wait"))
    with subprocess.Popen(lab.words(ref, "echo", "job"), env=lab.environment) as child:
        until((lab.log / "begun").exists, "the install has begun")
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) in (137, 143)
    assert sorted(os.listdir(lab.log)) == ["begun", "list.txt"]
    assert lab.left() == []


# --- attempts -------------------------------------------------------------------------------------


def test_a_start_that_was_killed_is_not_joined_with_the_next(lab: ContainerLab) -> None:
    """Both have the job's uid and no count of attempts, and neither says that it ends."""
    ref = lab.publish()
    lab.configure(checkpoint(lab) + deps(lab))
    lab.environment["BOOTSEER_JOB_UID"] = "job-1"
    words = lab.words(ref, "sh", "-c", "echo ready; while ! test -e /log/end; do sleep 0.1; done")
    with subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        os.kill(first.pid, signal.SIGKILL)  # its first step was never reached
        (lab.log / "end").touch()
    lab.await_layers(ref)
    until(lambda: lab.run(ref, "echo", "again") and not lab.left(), "all is swept")
    starts = analysis.analyse(load([str(lab.events)])).starts[::-1]
    points = lab.ends("start")
    assert [start.kind for start in starts] == ["first"] + ["restart"] * (len(points) - 1)
    assert [start.attempt for start in starts] == list(range(len(points)))
    # What each did is in its own start.
    assert len({event["trace_id"] for event in points}) == 1  # which nobody told apart
    began_s = [event["time_unix_nano"] / 1e9 for event in points]
    assert [start.began_unix_s for start in starts] == pytest.approx(began_s, abs=0.1)


def test_a_start_that_is_asked_for_in_a_container_does_not_begin_with_that_one(
    lab: ContainerLab,
) -> None:
    ref = lab.publish()
    lab.configure(checkpoint(lab))
    within = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    within += ["sh", "-c", 'sleep 2; "$@"; exit "$?"', "sh"]
    subprocess.run([*within, *lab.words(ref, "echo", "job")], env=lab.environment, check=True)
    (point,) = lab.ends("start")
    (start,) = analysis.analyse(load([str(lab.events)])).starts
    assert start.began_unix_s == pytest.approx(point["time_unix_nano"] / 1e9, abs=0.5)
