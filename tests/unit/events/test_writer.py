"""The event writer: format, bounds, threads, forks, and what a job may do to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import events
from tests.support.commands.run import PACKAGE, clean_env, lines, named
from tests.support.examples import examples

FIELDS = [
    "v",
    "event",
    "trace_id",
    "span_id",
    "parent_span_id",
    "name",
    "time_unix_nano",
    "mono_nano",
    "status",
    "attributes",
]


def test_lines_carry_exactly_the_documented_fields(tmp_path):
    with events.open_writer(str(tmp_path), {}) as writer, writer.phase("model.init", size=3):
        writer.point("first_step", "fallback")
    found = lines(tmp_path)
    assert [e["event"] for e in found] == ["resource", "begin", "point", "end"]
    assert all(list(e) == FIELDS for e in found)
    assert {e["trace_id"] for e in found} == {writer.trace_id}
    resource, begin, point, end = found
    assert begin["span_id"] == end["span_id"] == point["parent_span_id"]
    assert begin["attributes"] == {"size": 3}
    assert point["status"] == "fallback"
    assert end["time_unix_nano"] >= begin["time_unix_nano"]
    assert end["mono_nano"] >= begin["mono_nano"]
    assert resource["attributes"]["process.pid"] == os.getpid()
    assert len({e["span_id"][:10] for e in found}) == 1, "one writer's ids share their first digits"


def test_phase_that_raises_is_an_error_and_passes_the_exception_on(tmp_path):
    writer = events.open_writer(str(tmp_path), {})
    with pytest.raises(KeyError), writer.phase("compile"):
        raise KeyError("x")
    end = named(tmp_path, "compile", "end")[0]
    assert end["status"] == "error"
    assert end["attributes"] == {"error.type": "KeyError"}
    writer.close()
    writer.close()
    writer.point("after close")
    assert not named(tmp_path, "after close")


def test_times_from_logs_have_no_monotonic_clock(tmp_path):
    with events.open_writer(str(tmp_path), {}) as writer:
        span = writer.begin("a", time_unix_nano=5)
        writer.end(span, "a", time_unix_nano=7, mono_nano=9)
    begin, end = named(tmp_path, "a")
    assert (begin["time_unix_nano"], begin["mono_nano"]) == (5, None)
    assert (end["time_unix_nano"], end["mono_nano"]) == (7, 9)


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(), max_size=300),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
)
def test_any_name_and_value_make_one_strict_json_line(tmp_path, name, value):
    target = tmp_path / "one.jsonl"
    target.unlink(missing_ok=True)
    with events.Writer(str(target), {}) as writer:
        writer.point(name, attributes={"k": value, name: 1})
    raw = target.read_bytes()
    assert raw.count(b"\n") == 2
    assert raw.endswith(b"\n")
    for line in raw.splitlines():
        json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_odd_attributes_lose_themselves_alone(tmp_path):
    loop: list = []
    loop.append(loop)
    values = {"bad": Hostile(), "good": 1, "big": 10**5000, "nan": float("nan"), "loop": loop}
    values |= {"surrogate": "a\udcffb", "bytes": b"\xff\x00", "set": {1}}
    with events.open_writer(str(tmp_path), {}) as writer:
        writer.point("odd", attributes=values)
    found = named(tmp_path, "odd")[0]["attributes"]
    assert found["good"] == 1
    assert found["nan"] is None
    assert found["surrogate"] == "a?b"
    assert "bad" not in found


def test_a_line_is_bounded(tmp_path):
    many = {f"key{i}": "x" * 10_000 for i in range(1000)}
    with events.open_writer(str(tmp_path), {}) as writer:
        writer.point("big", attributes=many)
        writer.point("n" * 100_000)
    file = next(tmp_path.glob("*.jsonl"))
    assert max(map(len, file.read_bytes().splitlines())) <= events.MAX_LINE_BYTES
    assert named(tmp_path, "big")[0]["attributes"]["bootseer.dropped_bytes"] > 100_000


def test_secrets_never_reach_an_event(tmp_path):
    words = events.redact(
        [
            "pip",
            "--token",
            "t0p",
            "-i",
            "https://me:s3c@host/x?sig=abc",
            "API_KEY=k1",
            "--password=p",
        ]
    )
    shown = "pip --token *** -i https://***@host/x?*** API_KEY=*** --password=***"
    assert " ".join(words) == shown
    with events.open_writer(str(tmp_path), {}) as writer:
        writer.point("x", attributes={"u": ["see https://u:hunter2@h/a?X-Amz-Signature=q now"]})
    text = next(tmp_path.glob("*.jsonl")).read_text()
    assert "hunter2" not in text
    assert "Signature" not in text
    assert "https://***@h/a?*** now" in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["sh", "-c", "export HF_TOKEN=s3c\npip -i https://u:s3c@h/x a && python t.py --lr 3"],
            "sh -c export HF_TOKEN=***\npip -i https://***@h/x a && python t.py --lr 3",
        ),
        (["sh", "-c", "a --token \\\n  s3c b"], "sh -c a --token \\\n  *** b"),
        (["sh", "-c", "cd x; PASSWORD='my s3c pass' run it"], "sh -c cd x; PASSWORD=*** run it"),
        (["sh", "-c", "A=1\tAPI_KEY=s3c run"], "sh -c A=1 API_KEY=*** run"),
        (["curl", "-H", "Authorization: Bearer s3c", "x"], "curl -H Authorization: *** *** x"),
        (["sh", "-c", "curl -H 'X-Auth-Token: s3c' x"], "sh -c curl -H 'X-Auth-Token: *** x"),
        (["--password=two s3c words", "z"], "--password=*** z"),
        (["--password", "two s3c words", "z"], "--password *** z"),
        (["--access-key=s3c", "AWS_ACCESS_KEY_ID=s3c"], "--access-key=*** AWS_ACCESS_KEY_ID=***"),
        (
            ["podman", "-e", "PGPASS=abc", "--env", "X=y z", "--env=DB=q", "-e", "HOME", "i=1"],
            "podman -e PGPASS=*** --env X=*** --env=DB=*** -e HOME i=1",
        ),
        (["podman", "-ePGPASS=abc", "-eHOME", "x"], "podman -ePGPASS=*** -eHOME x"),
        (["curl", "-e", "https://u:s3c@h/?a=b", "z"], "curl -e https://***@h/?*** z"),
        (["sh", "-e", "PASSWORD: s3c a=b"], "sh -e PASSWORD: *** a=b"),
        (["ruby", "-e", "--token s3c x=1"], "ruby -e --token *** x=1"),
        (["curl", "-u", "me:s3c", "x"], "curl -u me:*** x"),
        (["curl", "-u", "me:s3c and more", "x"], "curl -u me:*** x"),
        (["curl", "-ume:s3c", "--proxy-user=me:s3c"], "curl -ume:*** --proxy-user=me:***"),
        (["sh", "-c", "curl --user 'me:s3c more' x"], "sh -c curl --user 'me:*** x"),
        (["curl", "-H", "X-Auth-Token:s3c", "x"], "curl -H X-Auth-Token:*** x"),
        (["sh", "-c", "curl -H'Private-Token:s3c' x"], "sh -c curl -H'Private-Token:*** x"),
        (["curl", "--header=X-Auth-Token:s3c", "x"], "curl --header=X-Auth-Token:*** x"),
        (["curl", "-H", "Authorization:Bearer s3c", "x"], "curl -H Authorization:*** *** x"),
        (
            ["sh", "-c", "cd x; GITHUB_PAT=s3c pip --pat s3c"],
            "sh -c cd x; GITHUB_PAT=*** pip --pat ***",
        ),
        (["--delegation=s3c", "x"], "--delegation=*** x"),
        (["git", "https://auth-token:s3c@h/x"], "git https://***@h/x"),
        (
            ["git", "https://token:s3c=@h", "https://u:s3c@h?token=s3c"],
            "git https://***@h https://***@h?token=***",
        ),
        (["x", "ghp_" + "a1B2" * 6, "xoxb-12345678901"], "x *** ***"),
        (["sh", "-c", "login AKIAABCDEFGHIJKLMNOP;"], "sh -c login ***;"),
        (["curl", "https://h/cb#access_token=s3c"], "curl https://h/cb#access_token=***"),
        (["x", "TOKEN=myauth:", "PASSWORD=Auth:s3c"], "x TOKEN=*** PASSWORD=***"),
        (["bash", "-c", "-u", "curl --token s3c"], "bash -c -u curl --token ***"),
        (
            ["http", "X-Auth-Token:s3c", "Authorization:s3c="],
            "http X-Auth-Token:*** Authorization:***",
        ),
        (["curl", "-HX-Api-Key:s3c", "x"], "curl -HX-Api-Key:*** x"),
        (
            ["sh", "-c", 'curl -H "Authorization:Bearer s3c" https://h/x -o f'],
            'sh -c curl -H "Authorization:*** https://h/x -o f',
        ),
        (["x", "sk-proj-" + "a-1" * 10], "x ***"),
        (["uvicorn", "auth:app", "--rdzv-endpoint", "auth-node:29500", "tokenizer:latest"], None),
        (["python", "hf_checkpoint_converter_main.py", "/e/sk-learn-2024-experiments-f/x"], None),
        (["git", "push", "-u", "https://github.com/x", "-url=h:80", "-url=http://h:80/x"], None),
        (["sh", "-c", "date -u +%H:%M; docker run -u $(id -u):$(id -g) img"], None),
        (["", ":", "-u", "://", "-u", "", "'"], None),
        (["docker", "-u", "1000:1000", "python", "-u", "t.py", "--path=x", "/mnt/disk-1"], None),
        (["x", "ghp_short", "task-a1B2a1B2a1B2a1B2a1B2", "sha256:ab", "host:80"], None),
        (["x", "--env=https://u:s3c@h/?q=1"], "x --env=https://***@h/?***"),
        (["sh", "-c", 'echo "$X"  y\n\nz', "--key-file", "f"], None),
    ],
)
def test_secrets_in_scripts_and_headers(words, shown):
    assert " ".join(events.redact(words)) == (" ".join(words) if shown is None else shown)


def test_threads_do_not_take_each_others_spans_for_parents(tmp_path):
    writer = events.open_writer(str(tmp_path), {})
    ready = threading.Barrier(2)

    def work(name: str) -> None:
        with writer.phase(name):
            ready.wait()
            writer.point(f"{name}.inside")
            ready.wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        begin, inside = named(tmp_path, name, "begin")[0], named(tmp_path, f"{name}.inside")[0]
        assert inside["parent_span_id"] == begin["span_id"]
    writer.close()


def in_child(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=clean_env(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_a_forked_child_writes_its_own_file_below_the_open_span(tmp_path):
    code = """
import os, bootseer
with bootseer.phase("outer"):
    pid = os.fork()
    bootseer.event("child" if pid == 0 else "parent")
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    bootseer.event("parent")
"""
    in_child(code, BOOTSEER_EVENTS=str(tmp_path))
    files = list(tmp_path.glob("*.jsonl"))
    assert len(files) == 2
    child_file = next(f for f in files if any(e["name"] == "child" for e in lines(f)))
    resource, point = lines(child_file)
    outer = named(tmp_path, "outer", "begin")[0]
    assert point["parent_span_id"] == outer["span_id"]
    assert point["trace_id"] == outer["trace_id"]
    assert str(resource["attributes"]["process.pid"]) in child_file.name
    ids = [e["span_id"] for e in lines(tmp_path) if e["event"] in ("begin", "point")]
    assert len(ids) == len(set(ids))


def test_a_reused_descriptor_is_left_alone(tmp_path):
    """A daemon closes everything and opens its own file under the number that was ours."""
    own = tmp_path / "own.txt"
    code = f"""
import os, bootseer
bootseer.event("before")
os.closerange(3, 100)
fd = os.open({str(own)!r}, os.O_WRONLY | os.O_CREAT)
bootseer.event("after")
os.write(fd, b"mine")
"""
    in_child(code, BOOTSEER_EVENTS=str(tmp_path / "events"))
    assert own.read_bytes() == b"mine"
    assert named(tmp_path / "events", "before")
    assert named(tmp_path / "events", "after")


def test_a_closed_standard_stream_does_not_become_the_event_file(tmp_path):
    code = """
import os
os.close(1)
import bootseer
bootseer.event("x")
try: os.write(1, b"not an event")
except OSError: pass
"""
    in_child(code, BOOTSEER_EVENTS=str(tmp_path))
    assert named(tmp_path, "x")


def test_no_place_for_events_is_silence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file" / "below"), str(tmp_path / "file" / "x.jsonl"), "a\0b"):
        writer = events.open_writer(place, {})
        assert isinstance(writer, events.NullWriter)
        assert not isinstance(writer, events.Writer)
        with writer.phase("p"):
            writer.point("q")
        assert len(events.child_environment(writer)["BOOTSEER_TRACEPARENT"]) == 55
        assert "BOOTSEER_EVENTS" not in events.child_environment(writer)
    done = in_child("import bootseer\nwith bootseer.phase('a'): bootseer.event('b')")
    assert done.stdout + done.stderr == ""


def test_a_fifo_without_reader_does_not_block(tmp_path):
    fifo = tmp_path / "pipe.jsonl"
    os.mkfifo(fifo)
    assert not isinstance(events.open_writer(str(fifo), {}), events.Writer)


def test_trace_ids_agree_over_nodes_and_follow_what_is_handed_down():
    env = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}
    expected = hashlib.sha256(b"77:2").hexdigest()[:32]
    assert events.trace_from_environment(env) == (expected, None)
    assert events.trace_from_environment({})[0] != events.trace_from_environment({})[0]
    assert events.trace_from_environment({"TORCHELASTIC_RUN_ID": "none"})[1] is None
    handed = {"BOOTSEER_TRACEPARENT": f"00-{'a' * 32}-{'b' * 16}-01", **env}
    assert events.trace_from_environment(handed) == ("a" * 32, "b" * 16)
    for broken in ("", "00-x-y-01", f"00-{'0' * 32}-{'b' * 16}-01", "a-b"):
        assert events.trace_from_environment({**handed, "BOOTSEER_TRACEPARENT": broken})[0] == (
            expected
        )


def test_a_worker_restarted_in_place_starts_the_same_new_trace_on_every_node():
    handed = {"BOOTSEER_TRACEPARENT": f"00-{'a' * 32}-{'b' * 16}-01"}
    again = {**handed, "TORCHELASTIC_RESTART_COUNT": "1"}
    first, parent = events.trace_from_environment(again)
    assert first == events.trace_from_environment(again)[0] != "a" * 32
    assert parent is None
    below = events.child_environment(events.NullWriter(first, "c" * 16), None, again)
    assert events.trace_from_environment({**again, **below}) == (first, "c" * 16)
    assert events.resource_from_environment(again)["bootseer.start.kind"] == "restart_in_place"


def test_the_resource_describes_rank_and_pod():
    env = {
        "RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "x",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "pod-a",
        "NODE_NAME": "node-1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=my%20job,team=x,broken",
    }
    found = events.resource_from_environment(env)
    assert found["bootseer.rank"] == 3
    assert found["bootseer.world_size"] == 16
    assert "bootseer.local_rank" not in found
    assert found["k8s.pod.name"] == "pod-a"
    assert found["k8s.node.name"] == "node-1"
    assert found["bootseer.gpu.count"] == 2
    assert found["service.name"] == "my job"
    assert found["team"] == "x"
    assert found["bootseer.start.kind"] == "first"


def test_the_writer_works_as_one_copied_folder(tmp_path):
    shutil.copytree(PACKAGE / "events", tmp_path / "events")
    code = "import events\nwith events.phase('a'): events.event('b')"
    subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path[:0]=[{str(tmp_path)!r}]\n{code}"],
        env={"BOOTSEER_EVENTS": str(tmp_path / "out")},
        check=True,
        timeout=60,
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0]=[{str(tmp_path)!r}]\n{code}"],
        env={"BOOTSEER_EVENTS": str(tmp_path / "out")},
        check=True,
        timeout=60,
    )
    assert len(named(tmp_path / "out", "b")) == 2
