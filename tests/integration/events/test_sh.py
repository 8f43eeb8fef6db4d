"""bootseer.sh in real shells: events like Python's, and a script that notices nothing."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.commands.run import BOOTSEER, PACKAGE, clean_env, lines, named, run, wrapped

pytestmark = pytest.mark.slow

LIBRARY = PACKAGE / "events" / "bootseer.sh"
SHELLS = {
    "bash": ["bash"],
    "bash posix": ["bash", "--posix"],
    "dash": ["dash"],
    "busybox": ["busybox", "sh"],
}
FIELDS = ["v", "event", "trace_id", "span_id", "parent_span_id", "name", "time_unix_nano"]
FIELDS += ["mono_nano", "status", "attributes"]


@pytest.fixture(
    params=[
        "bash",
        "bash posix",
        pytest.param("dash", marks=pytest.mark.debian("dash")),
        pytest.param("busybox", marks=pytest.mark.debian("busybox")),
    ]
)
def shell(request):
    assert shutil.which(SHELLS[request.param][0]), "a missing shell is a failure, not a skip"
    return SHELLS[request.param]


def script(shell: list[str], text: str, events=None, *flags: str, **env: str):
    env = clean_env(**env)
    if events is not None:
        env["BOOTSEER_EVENTS"] = str(events)
    full = f". {LIBRARY}\n{text}"
    return subprocess.run([*shell, *flags, "-c", full], env=env, capture_output=True, timeout=60)


def test_phases_nest_and_carry_codes(shell, tmp_path):
    text = """set -eu
bootseer_begin outer
bootseer_phase deps.install sh -c 'exit 0'
bootseer_phase bad sh -c 'exit 7' || echo "code $?"
bootseer_point mark fallback
bootseer_end outer 3
bootseer_end never_began
bootseer_point last
"""
    done = script(shell, text, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"code 7\n", b"")
    found = lines(tmp_path)
    assert all(list(e) == FIELDS for e in found)
    assert [(e["event"], e["name"], e["status"]) for e in found] == [
        ("resource", "resource", "ok"),
        ("begin", "outer", "ok"),
        ("begin", "deps.install", "ok"),
        ("end", "deps.install", "ok"),
        ("begin", "bad", "ok"),
        ("end", "bad", "error"),
        ("point", "mark", "fallback"),
        ("end", "outer", "error"),
        ("point", "last", "ok"),
    ]
    outer, bad = found[1], found[4]
    assert found[7]["span_id"] == outer["span_id"]
    assert found[2]["parent_span_id"] == bad["parent_span_id"] == outer["span_id"]
    assert found[5]["attributes"]["process.exit.code"] == 7
    assert found[8]["parent_span_id"] is None
    assert {e["span_id"][:10] for e in found} == {found[0]["span_id"][:10]}
    times = [e["time_unix_nano"] for e in found]
    assert times == sorted(times)
    assert times[0] > 1_500_000_000_000_000_000


def test_any_name_is_valid_json(shell, tmp_path):
    name = "a\"b\\c'd`e$f\tg\nh|i=j*k é\x01"
    done = script(shell, 'bootseer_phase "$NAME" true\nbootseer_point "$NAME"', tmp_path, NAME=name)
    assert done.stdout + done.stderr == b""
    shown = {e["name"] for e in lines(tmp_path) if e["event"] != "resource"}
    assert shown == {"a\"b\\c'd`e$f?g?h|i=j*k ???"}
    assert [e["event"] for e in lines(tmp_path)] == ["resource", "begin", "end", "point"]


def test_it_goes_on_below_a_run_and_hands_on_to_children(shell, tmp_path):
    inner = " ".join(wrapped("true", options=("--phase", "inner")))
    text = f". {LIBRARY}; bootseer_phase middle {inner}"
    run(wrapped(*shell, "-c", text, options=("--phase", "outer")), tmp_path)
    outer, middle, inner = (named(tmp_path, n, "begin")[0] for n in ("outer", "middle", "inner"))
    assert middle["parent_span_id"] == outer["span_id"]
    assert inner["parent_span_id"] == middle["span_id"]
    assert inner["trace_id"] == outer["trace_id"]


def test_trace_ids_are_pythons(shell, tmp_path):
    env = {"SLURM_JOB_ID": "88", "SLURM_RESTART_COUNT": "1", "RANK": "5", "WORLD_SIZE": "x"}
    script(shell, "bootseer_point a", tmp_path, **env)
    run([*BOOTSEER, "event", "point", "b"], tmp_path, env=clean_env(**env))
    a, b = named(tmp_path, "a")[0], named(tmp_path, "b")[0]
    assert a["trace_id"] == b["trace_id"]
    resource = lines(next(tmp_path.glob("*.jsonl")))[0]["attributes"]
    assert resource["bootseer.rank"] == 5
    assert "bootseer.world_size" not in resource


HANDED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    "env",
    [
        {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "88"},
        {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2", "BOOTSEER_ATTEMPT": "1"},
        {"BOOTSEER_TRACEPARENT": HANDED, "TORCHELASTIC_RESTART_COUNT": "0"},
        {"BOOTSEER_TRACEPARENT": HANDED, "TORCHELASTIC_RESTART_COUNT": "3"},
    ],
)
def test_job_and_restart_are_read_as_python_does(shell, tmp_path, env):
    """What a command below a phase of the shell writes joins the shell's trace again."""
    (tmp_path / "sh").mkdir()
    inner = " ".join([*BOOTSEER, "event", "point", "below"])
    script(shell, f"bootseer_point a; bootseer_phase p {inner}", tmp_path / "sh", **env)
    run([*BOOTSEER, "event", "point", "b"], tmp_path / "python", env=clean_env(**env))
    found = [e for e in lines(tmp_path / "sh") if e["event"] != "resource"]
    assert {e["trace_id"] for e in found} == {named(tmp_path / "python", "b")[0]["trace_id"]}
    keys = ("bootseer.job_uid", "bootseer.attempt", "bootseer.start.kind")
    said = {
        tuple(e["attributes"].get(key) for key in keys)
        for e in lines(tmp_path / "sh") + lines(tmp_path / "python")
        if e["event"] == "resource"
    }
    assert len(said) == 1


def test_torchruns_none_is_no_job(shell, tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        script(shell, "bootseer_point a", tmp_path / place, TORCHELASTIC_RUN_ID="none")
    one, two = (named(tmp_path / place, "a")[0]["trace_id"] for place in ("one", "two"))
    assert one != two


@pytest.mark.parametrize("place", [None, "file/below"])
def test_without_a_place_nothing_happens(shell, tmp_path, place):
    (tmp_path / "file").write_text("")
    text = "set -eu\nbootseer_begin a; bootseer_point b; bootseer_end a; bootseer_phase c echo ran"
    done = script(shell, text, None if place is None else tmp_path / place)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b"")


def test_errexit_works_as_before(shell, tmp_path):
    text = """set -e
f() { false; echo "must not be reached"; }
bootseer_phase strict f
echo "nor this"
"""
    done = script(shell, text, tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    done = script(shell, "set -e; bootseer_phase strict sh -c 'exit 9'; echo no", tmp_path)
    assert (done.returncode, done.stdout) == (9, b"")
    assert named(tmp_path, "strict", "end")[0]["attributes"]["process.exit.code"] == 9


def test_xtrace_shows_none_of_our_inside(shell, tmp_path):
    done = script(shell, "set -x\nbootseer_begin a\nbootseer_end a\nbootseer_point b", tmp_path)
    assert b"trace_id" not in done.stderr
    assert done.stderr.count(b"\n") <= 6
    assert done.stdout == b""


def test_words_and_streams_of_a_phase_are_untouched(shell, tmp_path):
    text = """bootseer_phase p sh -c 'cat; printf "[%s]" "$@"; echo err >&2' sh 'a b' '' '*'"""
    full = f". {LIBRARY}\n{text}"
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path))
    done = subprocess.run([*shell, "-c", full], env=env, capture_output=True, input=b"in")
    assert (done.stdout, done.stderr) == (b"in[a b][][*]", b"err\n")


def test_one_file_for_many_processes(shell, tmp_path):
    target = tmp_path / "all.jsonl"
    text = "i=0; while [ $i -lt 100 ]; do bootseer_point p; i=$((i+1)); done"
    env = clean_env(BOOTSEER_EVENTS=str(target))
    running = [subprocess.Popen([*shell, "-c", f". {LIBRARY}\n{text}"], env=env) for _ in range(4)]
    assert [p.wait(60) for p in running] == [0] * 4
    assert len(named(target, "p")) == 400
    assert len({e["span_id"] for e in named(target, "p")}) == 400


def test_bash_subshells_have_ids_of_their_own(tmp_path):
    text = "bootseer_begin a; (bootseer_phase b true); bootseer_phase b true; bootseer_end a"
    script(["bash"], text, tmp_path)
    begins = named(tmp_path, "b", "begin")
    assert len({e["span_id"] for e in begins}) == 2
    assert {e["parent_span_id"] for e in begins} == {named(tmp_path, "a", "begin")[0]["span_id"]}


def test_bash_needs_no_program(tmp_path):
    """Whatever would be forked for an event is not to be found here, and events still come."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "events").mkdir()
    env = {"PATH": str(tmp_path / "bin"), "BOOTSEER_EVENTS": str(tmp_path / "events")}
    body = f". {LIBRARY}; bootseer_phase p :; bootseer_point 'q \"'"
    done = subprocess.run(
        [shutil.which("bash"), "-c", body], env=env, capture_output=True, timeout=60
    )
    assert done.stdout + done.stderr == b""
    assert [e["event"] for e in lines(tmp_path / "events")] == ["resource", "begin", "end", "point"]


def test_sh_prints_where_it_lies():
    done = run([*BOOTSEER, "sh"])
    assert done.stdout.decode().strip() == str(LIBRARY)
