"""What an install command writes to, and the key that stands for its result."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.depsnap.key import (
    install_roots,
    pip_settings,
    python_probe,
    requirements,
    resolver,
    roots_state,
    snapshot_key,
)
from bootseer.depsnap.key.install_command import plan
from bootseer.depsnap.key.shell_script import simple_commands
from bootseer.depsnap.key.tool_options import FLAGS, SYNC_VALUED, VALUED, VENV_VALUED
from bootseer.errors import CorruptDataError, DeadlineError, NotFoundError, UsageError
from bootseer.events.redaction import is_secret_variable, redact_command_for_key, redact_for_key
from tests.support.samples.wheels import make_wheel

# --- the command's words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "tool", "attributes"),
    [
        (["pip", "install", "six"], "pip", {"requirements": ("six",)}),
        (
            ["pip3.11", "--quiet", "install", "-rreq.txt"],
            "pip",
            {"requirement_files": ("req.txt",)},
        ),
        (
            ["/opt/v/bin/python", "-m", "pip", "install", "x"],
            "pip",
            {"python": "/opt/v/bin/python"},
        ),
        (["python3", "-I", "-m", "pip", "install", "x"], "pip", {"python": "python3"}),
        (["pip", "install", "--target=/t", "x"], "pip", {"target": "/t"}),
        (["pip", "install", "-t", "/t", "x"], "pip", {"target": "/t", "requirements": ("x",)}),
        (["pip", "install", "--prefix", "/p", "x"], "pip", {"prefix": "/p"}),
        (["pip", "install", "--root", "/p", "x"], "pip", {"root": "/p"}),
        (["pip", "install", "--user", "x"], "pip", {"user": True}),
        (["pip", "install", "-i", "https://h/s", "x"], "pip", {"requirements": ("x",)}),
        (["uv", "pip", "install", "--python", "/v", "x"], "uv", {"python": "/v"}),
        (["uv", "pip", "install", "--system", "-r", "a"], "uv", {"system": True}),
        (["uv", "pip", "sync", "lock.txt"], "uv", {"requirement_files": ("lock.txt",)}),
        (["uv", "sync", "--frozen"], "uv-sync", {}),
        (["uv", "venv", "/v"], "venv", {"target": "/v"}),
        (["uv", "venv"], "venv", {"target": ".venv"}),
        (
            ["uv", "venv", "--find-links", "/wheels", "--prompt", "p", "/v"],
            "venv",
            {"target": "/v"},
        ),
        (["uv", "venv", "-c", "/v"], "venv", {"target": "/v"}),
        (["virtualenv", "--creator", "venv", "--pip", "23.2", "/v"], "venv", {"target": "/v"}),
        (["uv", "pip", "install", "--torch-backend", "cpu", "x"], "uv", {"requirements": ("x",)}),
        (["python3", "-m", "venv", "--copies", "/v"], "venv", {"target": "/v"}),
        (["env", "A=b", "pip", "install", "x"], "pip", {"requirements": ("x",)}),
        (
            ["env", "PIP_CONSTRAINT=/c", "A=$B", "pip", "install", "x"],
            "pip",
            {"variables": (("PIP_CONSTRAINT", "/c"),)},
        ),
        (["sh", "-c", "PIP_CONSTRAINT=$PWD/c pip install x"], "other", {"program": "pip"}),
        (["sh", "-c", "cd $A; PIP_CONSTRAINT=c pip install x"], "other", {"program": "pip"}),
        (["sh", "-c", "cd $A; PIP_CONSTRAINT=/c pip install x"], "pip", {"folder": ""}),
        (
            ["uv", "--config-file", "u.toml", "pip", "install", "x"],
            "uv",
            {"settings_file": "u.toml"},
        ),
        (["A=b", "make", "deps"], "other", {"program": "make"}),
        (["python", "setup.py", "install"], "other", {"program": "python"}),
    ],
)
def test_plan_of_one_command(command: list[str], tool: str, attributes: dict[str, object]) -> None:
    (found,) = plan(command)
    assert found.tool == tool
    assert {name: getattr(found, name) for name in attributes} == attributes


def test_variables_of_a_script_are_those_of_the_commands_behind_them() -> None:
    script = "A=1; export A B=2; C=3 pip install x && A=4; D=5; env B=6 sh -c 'E=7 pip install y'"
    given = [dict(install.variables) for install in plan(["env", "Z=0", "sh", "-c", script])]
    assert given == [
        {"Z": "0", "A": "1", "B": "2", "C": "3"},
        {"Z": "0", "A": "4", "B": "6", "E": "7"},
    ]


def test_plan_of_a_script() -> None:
    script = "set -e\npython3 -m venv /v && X=1 /v/bin/pip install -q 'six>1'; (uv pip install y)"
    found = plan(["bash", "-ec", script])
    assert [f.tool for f in found] == ["venv", "pip", "uv"]
    assert found[1].program == "/v/bin/pip"
    assert found[1].requirements == ("six>1",)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pip install a  # it's; b\npip install -r r\n", [["a"], ["-r", "r"]]),
        ("pip install ./p.zip#egg=p && pip install c", [["./p.zip#egg=p"], ["c"]]),
        ("pip install 'a # b' \"c #\" d\\ #e", [["a # b", "c #", "d #e"]]),
        ("# pip install a\npip install b;#c", [["b"]]),
        ("pip install \\\n  --target t a", [["--target", "t", "a"]]),
        ("echo ${#x} $#; pip install a", [["a"]]),
    ],
)
def test_comments_and_continued_lines_of_a_script_are_read_as_a_shell_does(
    script: str, words: list[list[str]]
) -> None:
    simple = [part.words for part in simple_commands(["sh", "-c", script])]
    assert [part[2:] for part in simple if part[:2] == ["pip", "install"]] == words
    shown = script.replace("pip install", "printf '<%s>' pip install")
    told = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert told.endswith("".join(f"<{word}>" for part in words[-1:] for word in part))


@pytest.mark.parametrize("command", [["pip", "list"], ["uv", "version"], [], ["pip"], ["env"]])
def test_commands_that_install_nothing(command: list[str]) -> None:
    assert plan(command) == []


@given(st.lists(st.text(max_size=12), max_size=6))
def test_plan_never_raises(words: list[str]) -> None:
    plan(words)
    plan(["sh", "-c", *words])


# --- roots ---------------------------------------------------------------------------------------


def found(command: list[str], cwd: Path, *also: str, **variables: str) -> install_roots.Target:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return install_roots.find(command, environ, str(cwd), also)


@pytest.mark.parametrize(
    "words",
    [
        ["pip", "install"],
        ["uv", "pip", "install"],
        ["uv", "pip", "sync"],
        ["uv", "pip", "uninstall"],
        ["uv", "sync"],
        ["uv", "venv"],
    ],
    ids=" ".join,
)
def test_no_option_that_takes_a_value_is_unknown(words: list[str]) -> None:
    """A value taken for a word of its own would be a package, or the place of an environment."""
    program = os.path.join(os.path.dirname(sys.executable), words[0])
    told = subprocess.run(
        [program, *words[1:], "--help"], capture_output=True, text=True, check=True
    )
    options, flags = set(), set()
    for line in told.stdout.splitlines():
        if re.match(r" +-.*? <\w", line):
            options |= set(re.findall(r"(?<![\w-])--?\w[\w-]*", line.partition("<")[0]))
        elif flag := re.match(r" +(?:(-\w), )?(--\w[\w-]*)(?:, --\w[\w-]*)*(?:  |$)", line):
            flags |= set(filter(None, flag.groups()))
    known = {"uv venv": VENV_VALUED, "uv sync": SYNC_VALUED}.get(" ".join(words), VALUED)
    assert len(options) > 5
    assert options - known <= UNUSUAL
    assert flags
    assert not flags & known
    assert flags - FLAGS <= UNUSUAL


UNUSUAL = {
    *("-h", "--help", "-V", "--version", "--dry-run", "--check", "--active", "--isolated"),
    *("--script", "--no-binary"),
}


def test_venv_of_the_pip_that_is_called(tmp_path: Path, venv: Path) -> None:
    target = found([f"{venv}/bin/pip", "install", "six"], tmp_path)
    assert target.paths == [str(venv)]
    assert target.python is not None
    assert target.python.prefix == str(venv)
    assert target.python.tag == sys.implementation.cache_tag


def test_venv_first_on_the_path(tmp_path: Path, venv: Path) -> None:
    path = f"{venv}/bin:{os.environ['PATH']}"
    assert found(["pip", "install", "six"], tmp_path, PATH=path).paths == [str(venv)]


def test_uv_searches_as_its_documents_say(tmp_path: Path, venv: Path) -> None:
    uv = ["uv", "pip", "install", "six"]
    assert found(uv, tmp_path, VIRTUAL_ENV=str(venv)).paths == [str(venv)]
    assert found([*uv, "--python", str(venv)], tmp_path).paths == [str(venv)]
    project = tmp_path / "project"
    (project / "deep").mkdir(parents=True)
    (project / ".venv").symlink_to(venv)
    assert found(uv, project / "deep").python.prefix in (  # type: ignore[union-attr]
        str(project / ".venv"),
        str(venv),
    )
    system = found([*uv, "--system"], project, VIRTUAL_ENV=str(venv))
    assert system.python is not None
    assert system.python.prefix != str(venv)


def test_environment_that_the_command_makes(tmp_path: Path) -> None:
    place = tmp_path / "new"
    script = f"python3 -m venv {place} && {place}/bin/pip install six"
    target = found(["sh", "-c", script], tmp_path)
    assert target.paths == [str(place)]
    assert target.python is not None


def test_target_directory_and_also(tmp_path: Path) -> None:
    target = found(
        ["pip", "install", "--target", "lib", "six"], tmp_path, "cache", str(tmp_path / "lib/in")
    )
    assert target.paths == [str(tmp_path / "lib"), str(tmp_path / "cache")]


def test_whole_root_swallows_the_rest(tmp_path: Path) -> None:
    assert found(["pip", "install", "--target", "lib", "six"], tmp_path, "/").paths == ["/"]


def test_variable_of_pip_names_the_target(tmp_path: Path) -> None:
    assert found(["pip", "install", "six"], tmp_path, PIP_TARGET="/t").paths == ["/t"]
    assert found(["env", "PIP_TARGET=/t", "pip", "install", "six"], tmp_path).paths == ["/t"]


@pytest.mark.parametrize("option", ["target", "prefix", "root"])
def test_settings_of_pip_name_the_target(tmp_path: Path, option: str) -> None:
    """`pip config set install.target DIR` is as good as the word."""
    conf = tmp_path / "pip/pip.conf"
    conf.parent.mkdir()
    conf.write_text(f"[install]\n{option} = /t\n")
    pip = [sys.executable, "-m", "pip", "install"]
    assert found([*pip, "six"], tmp_path, XDG_CONFIG_HOME=str(tmp_path)).paths == ["/t"]
    word = found([*pip, "--target", "/u", "six"], tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert word.paths == ["/u"]


def test_settings_of_pip_install_for_the_user(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nuser = yes\n")
    pip = [sys.executable, "-m", "pip", "install", "six"]
    target = found(pip, tmp_path, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert target.python is not None
    assert target.paths == [target.python.user_base]
    assert found(pip, tmp_path, PIP_USER="1").paths == target.paths


def test_variables_name_the_python(tmp_path: Path, venv: Path) -> None:
    """Of the active environment and a named Python, uv and pip take the named one."""
    python = str(venv / "bin/python")
    uv = ["uv", "pip", "install", "six"]
    assert found(uv, tmp_path, UV_PYTHON=python, VIRTUAL_ENV="/other").paths == [str(venv)]
    for pip in (["pip"], [sys.executable, "-m", "pip"]):
        assert found([*pip, "install", "six"], tmp_path, PIP_PYTHON=python).paths == [str(venv)]
        (tmp_path / "pip.conf").write_text(f"[global]\npython = {python}\n")
        told = found([*pip, "install", "six"], tmp_path, PIP_CONFIG_FILE=f"{tmp_path}/pip.conf")
        assert told.paths == [str(venv)]


@pytest.mark.parametrize("variables", [{"UV_PYTHON": "3"}, {"UV_SYSTEM_PYTHON": "0"}, {}])
def test_a_version_alone_leaves_uv_its_environments(
    tmp_path: Path, venv: Path, variables: dict[str, str]
) -> None:
    words = [] if variables else ["-p", "3"]
    uv = ["uv", "pip", "install", *words, "six"]
    assert found(uv, tmp_path, VIRTUAL_ENV=str(venv), **variables).paths == [str(venv)]


def test_an_uninstall_heeds_no_target(tmp_path: Path, venv: Path) -> None:
    pip = [str(venv / "bin/python"), "-m", "pip", "uninstall", "-y", "six"]
    assert found(pip, tmp_path, PIP_TARGET="/t").paths == [str(venv)]


def test_an_interpreter_is_asked_once(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = python_probe.ask
    monkeypatch.setattr(python_probe, "ask", lambda *words: asked.append(1) or ask(*words))
    found([str(venv / "bin/python"), "-m", "pip", "install", "--target", "t", "six"], tmp_path)
    assert asked == [1]


@pytest.mark.parametrize(
    "script",
    [
        "(export PIP_TARGET=/t; pip install six); pip install idna",
        "PIP_TARGET=/t; pip install six",
        "[ -e /flag ] && export PIP_TARGET=/t; pip install six",
        "export VIRTUAL_ENV=$PWD/b; uv pip install six",
        "export PATH=$PWD/b/bin:$PATH; pip install six",
        "pip install `cat list`",
        "uv pip install wheels/*.whl",
        "pip install -r /dev/stdin < list",
    ],
)
def test_what_a_shell_alone_knows_is_not_captured(tmp_path: Path, script: str) -> None:
    with pytest.raises(UsageError, match="--also"):
        found(["sh", "-c", script], tmp_path)


def test_variables_in_a_scripts_words_count(project: Project) -> None:
    command = ["sh", "-c", "pip install --no-deps $PACKAGES"]
    seen = set()
    for value in ("six", "idna", "idna"):
        project.environ["PACKAGES"] = value
        seen.add(project.key(command).digest)
    assert len(seen) == 2


def test_what_the_commands_own_path_brings_in_reach_counts(
    project: Project, tmp_path: Path
) -> None:
    command = ["env", f"PYTHONPATH={tmp_path}/more", *project.command]
    first = project.key(command).digest
    (tmp_path / "more/numpy-2.dist-info").mkdir(parents=True)
    assert project.key(command).digest != first


def test_only_what_a_list_itself_names_must_stand(project: Project) -> None:
    (project.home / "c.txt").write_text("idna<3\n")
    (project.home / "requirements.txt").write_text("-c c.txt\nsix==1\nalpha ; sys_platform=='x'\n")
    assert project.key().wanted == {"six"}
    (project.home / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert project.key(["uv", "pip", "install", "-r", "pyproject.toml"]).wanted == set()


def test_system_prefix(tmp_path: Path) -> None:
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    target = found([python, "-m", "pip", "install", "six"], tmp_path)
    assert target.python is not None
    purelib = target.python.paths["purelib"]
    assert any(purelib.startswith(path + "/") for path in target.paths) or target.paths
    assert "/usr" not in target.paths
    assert "/" not in target.paths


def test_an_environments_python_is_asked_without_what_takes_long_to_import() -> None:
    described = python_probe.ask(sys.executable, os.environ)
    assert described is not None
    assert described.version == platform.python_version()
    assert described.executable == sys.executable
    assert described.paths["purelib"] == sysconfig.get_paths()["purelib"]
    listed = f"{python_probe.PROBE}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", listed], capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.splitlines()[-1].split())
    assert "sysconfig" in modules
    assert not modules & {"json", "platform", "re", "subprocess"}


@pytest.mark.parametrize(
    "program",
    [
        "exit 3",
        "echo hello",
        "printf 'a\\0'",
        "kill -9 $$",
        "printf '%s\\0' $(seq 10) x",
    ],
)
def test_what_is_no_python_describes_nothing(tmp_path: Path, program: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho asked >{tmp_path}/asked\n{program}\n")
    python.chmod(0o755)
    assert python_probe.ask(str(python), os.environ) is None
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("flush", [False, True])
def test_a_python_that_others_let_print_describes_nothing(tmp_path: Path, flush: bool) -> None:
    """What they print would be taken for its path, or for a part of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    python = str(tmp_path / "v/bin/python")
    assert python_probe.ask(python, os.environ) is not None
    (packages,) = tmp_path.glob("v/lib/python3*/site-packages")
    (packages / "noise.pth").write_text(f"import sys; print('hello', flush={flush})\n")
    assert python_probe.ask(python, os.environ) is None


@pytest.mark.parametrize("name", ["no-such-python", "./no-such-python", "/dev/null", "a\0b", "sh"])
def test_what_cannot_be_started_describes_nothing(name: str) -> None:
    assert python_probe.ask(name, os.environ) is None


@pytest.mark.parametrize("more", ["", "exec >&-; "])
def test_a_python_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/process\n{more}exec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(python_probe, "PROBE_TIMEOUT_S", 2.0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DeadlineError, match="within 2 s, so nothing is restored or kept"):
        python_probe.ask(str(python), os.environ)
    process = int((tmp_path / "process").read_text())
    assert not os.path.exists(f"/proc/{process}")
    assert os.listdir("/proc/self/fd") == before


def test_paths_of_any_bytes_are_told_exactly(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff \xc3\xa9"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    os.rename(tmp_path / "v", odd)
    described = python_probe.ask(os.fsdecode(odd) + "/bin/python", os.environ)
    assert described is not None
    assert os.fsencode(described.prefix) == odd


def test_distributions_are_found_where_installers_put_them(tmp_path: Path) -> None:
    wanted = ["a.dist-info", "b.egg-info"]
    wanted += ["lib/python3.11/site-packages/c.dist-info", "lib/python3.9/site-packages/d.egg-info"]
    wanted += ["lib64/python3.11/site-packages/e.dist-info", "lib/python3/dist-packages/f.egg-info"]
    wanted += ["usr/local/lib/python3.11/dist-packages/g.dist-info"]
    others = ["lib/python2.7/site-packages/h.dist-info", "lib/site-packages/i.dist-info"]
    others += [
        ".j.dist-info",
        "lib/python3.11/k.dist-info",
        "usr/local/lib/.python3/site-packages/l",
    ]
    for name in wanted + others:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/python3.12").mkdir()
    (tmp_path / "lib/python3.12/site-packages").symlink_to(
        tmp_path / "lib/python3.11/site-packages"
    )
    (tmp_path / "lib/python3.13").write_text("no folder")
    found = roots_state.distributions(str(tmp_path))
    assert sorted(found) == sorted(str(tmp_path / name) for name in wanted)
    assert roots_state.distributions(str(tmp_path / "nowhere")) == []


def test_an_interpreter_asked_ahead_is_not_asked_again(tmp_path: Path) -> None:
    python = tmp_path / "v/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho asked >>{tmp_path}/asked\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["uv", "pip", "install", "--python", str(python), "six"]
    plain = install_roots.find(command, os.environ, str(tmp_path))
    install_roots.begin_to_ask(command, os.environ, str(tmp_path))
    assert install_roots.find(command, os.environ, str(tmp_path)) == plain
    assert (tmp_path / "asked").read_text() == "asked\n" * 2


def test_an_interpreter_that_is_not_there_can_be_asked_ahead(tmp_path: Path) -> None:
    command = ["uv", "pip", "install", "--python", str(tmp_path / "no/bin/python"), "six"]
    install_roots.begin_to_ask(command, os.environ, str(tmp_path))
    assert install_roots.find(command, os.environ, str(tmp_path)).python is None


def test_missing_interpreter_is_no_error(tmp_path: Path) -> None:
    target = found(["/nowhere/bin/pip", "install", "six"], tmp_path)
    assert target.paths == ["/nowhere"]
    assert target.python is None


# --- secrets -------------------------------------------------------------------------------------

SECRET = "s3cr3tv4lue"


@pytest.mark.parametrize(
    "word",
    [
        f"https://user:{SECRET}@host/simple",
        f"https://{SECRET}@host/simple",
        f"git+https://oauth2:{SECRET}@host/r.git@v1#egg=x",
        f"https://user:{SECRET}@more@host/simple",
        f"https://host/x.whl?token={SECRET}&b=1",
        f"https://host/x.whl?X-Amz-Signature={SECRET}",
        f"https://host/x.whl?sv=1&sig={SECRET}",
        f"--password={SECRET}",
        f"--api-key={SECRET}",
        f"HF_TOKEN={SECRET} pip install x",
        f"export MY_SECRET='{SECRET}'",
        f"curl -H 'Authorization: Bearer {SECRET}' https://h",
        f"Private-Token: {SECRET}",
        f"GITHUB_PAT={SECRET} pip install x",
        f"--auth={SECRET}",
        f"curl -u me:{SECRET} https://h",
        f"MY_\u017fECRET={SECRET}",  # a long s, which to a pattern is an s
        f"API_\u212aEY={SECRET}",
    ],
)
def test_secrets_leave_words_and_texts(word: str) -> None:
    assert SECRET not in redact_for_key(word)
    assert redact_for_key(redact_for_key(word)) == redact_for_key(word)


def test_secret_after_its_option() -> None:
    assert redact_command_for_key(["x", "--token", SECRET, "y"]) == [
        "x",
        "--token",
        "***",
        "y",
    ]
    assert redact_command_for_key(["curl", "-u", f"me:{SECRET}", "y"]) == [
        "curl",
        "-u",
        "me:***",
        "y",
    ]


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (f"cd x && pip --token {SECRET} six", "cd x && pip --token *** six"),
        (f"x --api-key '{SECRET} y'; z", "x --api-key ***; z"),
        (f"x --my-password \\\n {SECRET}", "x --my-password \\\n ***"),
        (f"curl http://h/p?op=OPEN&delegation={SECRET}", "curl http://h/p?op=OPEN&delegation=***"),
        (f"PRIVATE_KEY={SECRET} pip install x", "PRIVATE_KEY=*** pip install x"),
        (f"x --private-key={SECRET}", "x --private-key=***"),
    ],
)
def test_secrets_leave_scripts(script: str, shown: str) -> None:
    for _ in range(2):
        [*_, script] = redact_command_for_key(["sh", "-c", script])
        assert script == shown


@pytest.mark.parametrize(
    "script",
    [
        'pip --token "$HF_TOKEN" six',
        "pip --token $HF_TOKEN six",
        "pip --use-token six==1.16; pip --no-auth six",
        "pip --token six==1.16",
        "pip --token 'six==1.16'",
        "x --auth basic --token-file f --tokenizer gpt2 --ask-password",
        "x --token && pip install six",
        "npm install --always-auth left-pad; pip --skip-token torch --enable-token numpy --auth u",
        "x --token --user six",
        "ansible --private-key f.pem --use-delegation=true --path x",
    ],
)
def test_a_script_without_secrets_stays(script: str) -> None:
    assert redact_command_for_key(["sh", "-c", script]) == ["sh", "-c", script]


def test_variables_that_no_key_may_hold() -> None:
    for name in ("GITHUB_PAT", "PAT", "SSH_PRIVATE_KEY"):
        assert is_secret_variable(name)
    for name in ("PATH", "X_PATCH", "KEY_FILE", "TOKENIZERS", "WITH_AUTH"):
        assert not is_secret_variable(name)


def test_tokens_are_known_by_their_form() -> None:
    for start in ("ghp_", "hf_", "github_pat_", "sk-", "glpat-"):
        assert redact_for_key(f"git clone {start}{'a1B2' * 6} x") == "git clone *** x"
    for word in ("xoxb-12345678901", "pypi-AgEIcHlwaS5", "AKIAABCDEFGHIJKLMNOP"):
        assert redact_for_key(f"x {word} y") == "x *** y"


def test_ordinary_words_stay() -> None:
    for word in ("six==1.16", "git+https://host/r.git@v1", "torch @ https://h/t.whl#sha256=ab"):
        assert redact_for_key(word) == word


# --- the key -------------------------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (place / "bin/pip").write_text(f"#!{place}/bin/python\n")
    (place / "bin/pip").chmod(0o755)
    return place


class Project:
    """A working directory with requirements whose lock is closed, and a way to ask for the key."""

    def __init__(self, home: Path, venv: Path) -> None:
        self.home = home
        self.command = [f"{venv}/bin/pip", "install", "--no-deps", "-r", "requirements.txt"]
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(home)}
        (home / "requirements.txt").write_text("six==1.16\n")

    def key(self, command: list[str] | None = None, **more: object) -> snapshot_key.Key:
        words = command or self.command
        target = install_roots.find(words, self.environ, str(self.home))
        state = more.pop("state", roots_state.base_state(target))
        settings = {"key_files": (), "environ": self.environ, "cwd": str(self.home), **more}
        return snapshot_key.make(
            snapshot_key.Question(command=words, target=target, state=state, **settings)  # type: ignore[arg-type]
        )


@pytest.fixture
def project(tmp_path: Path, venv: Path) -> Project:
    home = tmp_path / "project"
    home.mkdir()
    return Project(home, venv)


def test_same_inputs_same_key(project: Project) -> None:
    assert project.key() == project.key()
    assert project.key().closed


def test_each_input_changes_the_key(project: Project, tmp_path: Path) -> None:
    seen = {"plain": project.key().digest}
    seen["words"] = project.key([*project.command, "-q"]).digest
    seen["image"] = project.key(image_digest="sha256:1").digest
    seen["signer"] = project.key(signer="abc").digest
    seen["state"] = project.key(state="other").digest
    project.environ["PIP_INDEX_URL"] = "https://h/one"
    seen["index"] = project.key().digest
    del project.environ["PIP_INDEX_URL"]
    project.environ["MINE"] = "1"
    assert project.key().digest == seen["plain"]
    seen["key-env"] = project.key(key_env=("MINE",)).digest
    (project.home / "requirements.txt").write_text("six==1.17\n")
    seen["requirements"] = project.key().digest
    (project.home / "requirements.txt").write_text("-r other.txt\n")
    (project.home / "other.txt").write_text("six==1\n")
    seen["include"] = project.key().digest
    (project.home / "other.txt").write_text("six==2\n")
    seen["included"] = project.key().digest
    (project.home / "extra").write_text("1")
    seen["key-file"] = project.key(key_files=("extra",)).digest
    (project.home / ".config/pip").mkdir(parents=True)
    (project.home / ".config/pip/pip.conf").write_text("[global]\nindex-url = https://h/two\n")
    seen["settings"] = project.key().digest
    project.environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    (tmp_path / "xdg/pip").mkdir(parents=True)
    (tmp_path / "xdg/pip/pip.conf").write_text("[global]\nindex-url = https://h/three\n")
    seen["other settings"] = project.key().digest
    (tmp_path / "pyproject.toml").write_text("[tool.uv]\nindex-url = 'https://h/four'\n")
    seen["uv's settings"] = project.key().digest
    seen["excluded"] = project.key(exclude=("*.so",)).digest
    (project.home / "c.txt").write_text("six<2\n")
    constrained = [*project.command, "-c", "c.txt"]
    seen["constrained"] = project.key(constrained).digest
    (project.home / "c.txt").write_text("six<3\n")
    seen["constraint"] = project.key(constrained).digest
    (tmp_path / "more/numpy-2.dist-info").mkdir(parents=True)
    project.environ["PYTHONPATH"] = str(tmp_path / "more")
    seen["in reach"] = project.key().digest
    assert len(set(seen.values())) == len(seen), seen


def test_a_constraint_file_named_as_standard_input_counts(project: Project) -> None:
    """pip opens a file of that name; only a list of requirements is read from standard input."""
    command = [*project.command, "-c", "-"]
    with pytest.raises(NotFoundError):
        project.key(command)
    digests = set()
    for text in ("six<2\n", "six<3\n"):
        (project.home / "-").write_text(text)
        digests.add(project.key(command).digest)
    assert len(digests) == 2


def test_constraints_that_uv_reads_from_standard_input_have_no_key(project: Project) -> None:
    (project.home / "-").write_text("six<2\n")
    with pytest.raises(UsageError, match="standard input"):
        project.key(["uv", "pip", "install", "six", "-c", "-"])


@pytest.mark.parametrize("at", ["XDG_CONFIG_DIRS", "HOME", "PIP_CONFIG_FILE", "PIP_CONSTRAINT"])
def test_what_a_constraint_that_settings_name_says_counts(
    project: Project, tmp_path: Path, at: str
) -> None:
    """A machine's pip.conf names one as often as a command line does."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "of-all.txt").write_text("-c of-some.txt\n")
    (tmp_path / "of-some.txt").write_text("six<2\n")
    named = f"{tmp_path}/nowhere.txt {tmp_path}/of-all.txt https://h/more.txt"
    file = tmp_path / {"XDG_CONFIG_DIRS": "pip/pip.conf", "HOME": ".pip/pip.conf"}.get(at, "chosen")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"[install]\nconstraint = {named}\n")
    values = {"PIP_CONFIG_FILE": str(file), "PIP_CONSTRAINT": named}
    project.environ[at] = values.get(at, str(tmp_path))
    first = project.key().digest
    assert project.key().digest == first
    (tmp_path / "of-some.txt").write_text("six<3\n")
    assert project.key().digest != first


def test_settings_of_pip_count_wherever_xdg_puts_them(project: Project, tmp_path: Path) -> None:
    project.environ["XDG_CONFIG_DIRS"] = f"{tmp_path}/one:{tmp_path}/two"
    seen = {project.key().digest}
    for place in ("one/pip/pip.conf", "two/pip/pip.conf", "two/uv/uv.toml"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("# a word\n")
        seen.add(project.key().digest)
    assert len(seen) == 4


@pytest.mark.parametrize(
    "included",
    ["nowhere.txt", "${C_HOME}/x.txt", '"a b.txt"', "file:///nowhere/x.txt", "file:/nowhere/x.txt"],
)
def test_a_list_counts_though_what_it_includes_is_not_there(
    project: Project, tmp_path: Path, included: str
) -> None:
    """One name that could not be read took all lists of a setting out of the key."""
    project.environ["PIP_CONSTRAINT"] = f"{tmp_path}/c.txt"
    seen = set()
    for text in ("zzz<2", "zzz<3"):
        (tmp_path / "c.txt").write_text(f"-c {included}\n{text}\n")
        made = project.key()
        seen.add(made.digest)
        assert made.digest == project.key().digest
        assert "not found" in {i.value for i in made.ingredients}
    assert len(seen) == 2


@pytest.mark.parametrize(
    "included", ["'${C_HOME}/a b.txt'", '"a b.txt"', "a\\ b.txt", "file:/HERE/a%20b.txt#x"]
)
@pytest.mark.parametrize("at", ["settings", "the command"])
def test_what_is_included_is_found_as_pip_finds_it(
    project: Project, tmp_path: Path, included: str, at: str
) -> None:
    name = included.replace("/HERE", str(tmp_path))
    (tmp_path / "c.txt").write_text(f"six<9\n-c \\\n  {name}  # why\n")
    project.environ["C_HOME"] = str(tmp_path)
    if at == "settings":
        project.environ["PIP_CONSTRAINT"] = f"file://localhost{tmp_path}/c.txt"
    command = project.command + (["-c", f"FILE:{tmp_path}/c.txt"] if at == "the command" else [])
    seen = set()
    for text in ("zzz<2", "zzz<3"):
        (tmp_path / "a b.txt").write_text(text)
        seen.add(project.key(command).digest)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("{pip} install six", {"PIP_CONSTRAINT": "file://{home}/sub/c.txt"}),
        ("{pip} install six", {"PIP_CONSTRAINT": "file:{home}/sub/c.txt"}),
        ("{pip} install six", {"PIP_constraint": "{home}/sub/c.txt"}),
        ("{uv} six", {"UV_EXCLUDE": "sub/c.txt"}),
        ("{uv} --config-file sub/c.txt six", {}),
        ("{uv} --directory sub --config-file c.txt six", {}),
        ("{uv} --directory sub six", {"UV_CONSTRAINT": "c.txt"}),
        ("{uv} six", {"UV_CONSTRAINT": "c.txt", "UV_WORKING_DIR": "sub"}),
        ("{uv} six", {"UV_CONFIG_FILE": "c.txt", "UV_WORKING_DIR": "sub"}),
        ("env PIP_CONSTRAINT=sub/c.txt {pip} install six", {}),
        ("env PIP_CONFIG_FILE=sub/p.conf {pip} install six", {}),
        ("sh -c 'PIP_CONSTRAINT={home}/sub/c.txt {pip} install six'", {}),
        ("sh -c 'export PIP_CONSTRAINT=c.txt; cd sub && {pip} install six'", {}),
        ("sh -c 'cd sub && {pip} install six'", {"PIP_CONSTRAINT": "c.txt"}),
        ("sh -c 'cd sub && {pip} install six'", {"PIP_CONFIG_FILE": "p.conf"}),
    ],
)
def test_what_is_named_counts_wherever_and_however_it_is_named(
    project: Project, words: str, variables: dict[str, str]
) -> None:
    pip = project.command[0]
    names = {"home": str(project.home), "pip": pip}
    names["uv"] = f"uv pip install --python {pip.removesuffix('/bin/pip')}"
    project.environ |= {name: value.format(**names) for name, value in variables.items()}
    (project.home / "sub").mkdir()
    (project.home / "sub/p.conf").write_text("[global]\nconstraint = sub/c.txt c.txt\n")
    seen = set()
    for text in ("zzz<2", "zzz<3"):
        (project.home / "sub/c.txt").write_text(text)
        made = project.key(shlex.split(words.format(**names)))
        seen.add(made.digest)
    assert len(seen) == 2
    assert any(i.name in ("settings sub/c.txt", "settings c.txt") for i in made.ingredients)


def test_a_constraint_of_two_checkouts_is_one(tmp_path: Path, venv: Path) -> None:
    seen = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        project = Project(tmp_path / name, venv)
        project.environ |= {"PIP_CONFIG_FILE": "p.conf", "UV_CONSTRAINT": "c.txt"}
        (project.home / "c.txt").write_text("six<2\n")
        (project.home / "p.conf").write_text("[install]\nconstraint = c.txt\n")
        seen.add(project.key().digest)
    assert len(seen) == 1


def test_settings_that_name_no_list_are_not_parsed(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What parses them takes a start longer to import than all that it reads."""
    monkeypatch.setattr(pip_settings, "FOR_ALL", "/nonexistent")
    monkeypatch.setitem(sys.modules, "configparser", None)
    project.environ |= {"XDG_CONFIG_DIRS": "/nonexistent", "PIP_CONFIG_FILE": f"{tmp_path}/p.conf"}
    (tmp_path / "p.conf").write_text("[global]\nindex-url = https://h/simple\n")
    first = project.key().digest
    (tmp_path / "p.conf").write_text("[global]\nindex-url = https://h/other\n")
    assert project.key().digest != first
    (tmp_path / "p.conf").write_text("[global]\nCONSTRAINT = c.txt\n")
    with pytest.raises(ImportError):
        project.key()


@pytest.mark.parametrize("at", ["-r", "-c", "PIP_CONSTRAINT"])
def test_a_variable_in_a_list_counts_with_its_value(
    project: Project, tmp_path: Path, at: str
) -> None:
    login = "--extra-index-url https://${LOGIN}:${PHRASE}@h/simple"
    (tmp_path / "r.txt").write_text(
        f"{login}\nsix==${{SIX_V}}\n--find-links https://${{MY_TOKEN}}@h/\n"
    )
    command = [*project.command, *([at, f"{tmp_path}/r.txt"] if at[0] == "-" else [])]
    project.environ |= {"LOGIN": SECRET, "PHRASE": SECRET, "MY_TOKEN": SECRET}
    project.environ |= {"PIP_CONSTRAINT": f"{tmp_path}/r.txt"} if at[0] != "-" else {}
    unset = project.key(command)
    keys = {unset.digest}
    for version in ("1.16", "1.17"):
        project.environ["SIX_V"] = version
        keys.add(project.key(command).digest)
    assert len(keys) == 3
    assert unset.closed is (at != "-r"), "what fills it in may be any version"
    names = {i.name for i in project.key(command).ingredients}
    assert "variable SIX_V" in names
    assert not names & {"variable LOGIN", "variable PHRASE", "variable MY_TOKEN"}
    assert SECRET not in json.dumps(project.key(command).explain())


@pytest.mark.parametrize("option", ["requirement", "editable", "group"])
@pytest.mark.parametrize("at", ["variables", "a file"])
def test_what_settings_install_besides_is_an_indexs_to_decide(
    project: Project, tmp_path: Path, option: str, at: str
) -> None:
    (project.home / "pkg").mkdir()
    (project.home / "r.txt").write_text("idna\n./pkg\n")
    (project.home / "pkg/pyproject.toml").write_text("[project]\nname='x'\n")
    value = {"requirement": "r.txt", "editable": "./pkg", "group": "pkg/pyproject.toml:g"}[option]
    assert project.key().closed
    pinned = [project.command[0], "install", "six==1.16"]
    assert project.key(pinned).all_exact
    if at == "variables":
        project.environ[f"PIP_{option.upper()}"] = value
    else:
        project.environ["PIP_CONFIG_FILE"] = "p.conf"
        (project.home / "p.conf").write_text(f"[install]\n{option} = {value}\n")
    made = project.key()
    assert not made.closed
    assert not project.key(pinned).all_exact
    assert not made.is_lock_of({"six": "1.16"})
    assert project.key([pinned[0], "uninstall", "-y", "six"]).closed
    (project.home / "pkg/pyproject.toml").write_text("[project]\nname='y'\n")
    assert project.key().digest != made.digest


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("constraint = /dev/null", {}),
        ("constraint = a\0b", {}),
        ("constraint = .", {}),
        ("constraint = " + "n" * 300, {}),
        ("constraint = pipe", {"PIP_CONSTRAINT": "c.txt"}),
        ("", {"PIP_CONSTRAINT": "/dev/null"}),
        ("", {"UV_CONFIG_FILE": "/dev/null"}),
        ("", {"UV_CONFIG_FILE": "."}),
        ("", {"PIP_CONFIG_FILE": "."}),
        ("", {"PIP_CONFIG_FILE": "loop"}),
        ("", {"XDG_CONFIG_DIRS": "loop"}),
    ],
)
def test_what_pip_and_uv_pass_over_costs_no_key(
    project: Project, text: str, variables: dict[str, str]
) -> None:
    (project.home / "loop").symlink_to("loop")
    os.mkfifo(project.home / "pipe")
    (project.home / "c.txt").write_text("six<2\n")
    (project.home / "p.conf").write_text(f"[global]\n{text}\n")
    project.environ |= {"PIP_CONFIG_FILE": "p.conf", **variables}
    assert project.key().closed
    (project.home / "c.txt").write_text("six<3\n")
    project.key()


@pytest.mark.parametrize("name", ["PIP_CONSTRAINT", "PIP_CONFIG_FILE", "UV_CONFIG_FILE"])
def test_a_fifo_that_settings_name_has_no_key(project: Project, name: str) -> None:
    os.mkfifo(project.home / "pipe")
    project.environ[name] = "pipe"
    with pytest.raises(CorruptDataError, match="FIFO"):
        project.key()


def test_packages_of_the_system_count_where_they_are_seen(tmp_path: Path) -> None:
    """pip installs nothing again that lies below the environment."""
    base = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    site = next(base.glob("lib/python3*/site-packages"))
    (site / "base.pth").write_text("import site; site.addsitedir('" + str(tmp_path / "sys") + "')")
    (tmp_path / "sys/numpy-1.dist-info").mkdir(parents=True)
    command = [f"{base}/bin/python", "-m", "pip", "install", "--no-deps", "six==1"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def digest() -> str:
        target = install_roots.find(command, environ, str(tmp_path))
        question = snapshot_key.Question(command, (), target, "state", environ, str(tmp_path))
        return snapshot_key.make(question).digest

    first = digest()
    (site / "six-1.dist-info").mkdir()
    assert digest() == first, "what lies in the root counts by the state before"
    (tmp_path / "sys/pandas-1.dist-info").mkdir()
    assert digest() != first


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        (["--no-deps", "six==1.0", "a-b[x] === 2 ; python_version>'3'", "./pkg"], True),
        (["--require-hashes", "six"], True),
        (["six==1.0"], False),
        (["--no-deps", "six"], False),
        (["--no-deps", "six==1.*"], False),
        (["--no-deps", "six>=1"], False),
        (["--no-deps", "six==1.0", "x @ git+https://h/x@main"], False),
    ],
)
def test_an_index_has_a_say_unless_all_is_exact(
    tmp_path: Path, words: list[str], *, closed: bool
) -> None:
    (tmp_path / "pkg").mkdir()
    installs = plan(["pip", "install", *words])
    assert requirements.read_inputs(installs, str(tmp_path)).open_ended is not closed
    (tmp_path / "r.txt").write_text("".join(f"{w} # why\n" for w in words if w[0] != "-"))
    options = [w for w in words if w[0] == "-"]
    installs = plan(["pip", "install", *options, "-r", "r.txt"])
    assert requirements.read_inputs(installs, str(tmp_path)).open_ended is not closed


def test_a_project_of_uv_is_found_from_below_and_open_without_a_lock(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname='x'\n")
    (tmp_path / "sub").mkdir()
    installs = plan(["uv", "sync"])
    found = requirements.read_inputs(installs, str(tmp_path / "sub"))
    assert found.open_ended
    assert [label.rpartition("/")[2] for label in found.digests][:1] == ["pyproject.toml"]
    (tmp_path / "uv.lock").write_text("version = 1\n")
    found = requirements.read_inputs(installs, str(tmp_path / "sub"))
    assert not found.open_ended
    labels = list(found.digests)
    assert [label.startswith("file ") for label in labels] == [True, True, False]


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "secretstorage", "auth-client"])
@pytest.mark.parametrize("form", ["{}=={}", '{} = "^{}"', '{}="^{}"', "{}={}=py3", "{}: {}"])
def test_a_package_that_is_named_like_a_secret_is_none(
    project: Project, name: str, form: str
) -> None:
    seen = set()
    for version in ("0.15.2", "0.19.1"):
        (project.home / "requirements.txt").write_text(form.format(name, version))
        seen.add(project.key([*project.command[:2], "--require-hashes", "-r", "requirements.txt"]))
    assert len(seen) == 2


def test_a_credential_is_refused_as_a_part_of_the_key(project: Project) -> None:
    project.environ |= {"MY_TOKEN": SECRET, "TOKENIZERS_VERSION": "1"}
    with pytest.raises(UsageError, match="MY_TOKEN"):
        project.key(key_env=("MY_TOKEN",))
    assert project.key(key_env=("TOKENIZERS_VERSION",)).digest != project.key().digest


def test_neutral_variables_do_not_change_the_key(project: Project) -> None:
    plain = project.key().digest
    project.environ |= {"PIP_CACHE_DIR": "/x", "UV_LINK_MODE": "copy", "LANG": "C", "PIP_LOG": "/l"}
    assert project.key().digest == plain


def test_no_secret_reaches_the_ingredients_and_rotation_keeps_the_key(project: Project) -> None:
    def with_secret(secret: str) -> snapshot_key.Key:
        project.environ["PIP_INDEX_URL"] = f"https://u:{secret}@h/simple"
        project.environ["UV_INDEX_MINE_PASSWORD"] = secret
        text = f"--extra-index-url https://u:{secret}@h/simple\nsix==1.16\n"
        (project.home / "requirements.txt").write_text(text)
        command = [*project.command, "--trusted-host", "h", f"--index-url=https://{secret}@h/s"]
        return project.key(command)

    first, second = with_secret(SECRET), with_secret("another-one")
    assert SECRET not in json.dumps(first.explain())
    assert first == second


def test_local_package_counts_with_its_content(project: Project) -> None:
    package = project.home / "pkg"
    (package / "src").mkdir(parents=True)
    (package / "pyproject.toml").write_text("[project]\nname='x'\n")
    (package / "src/x.py").write_text("A = 1\n")
    command = [project.command[0], "install", "--no-deps", "-e", "./pkg", "./pkg"]
    first = project.key(command)
    (package / "src/__pycache__").mkdir()
    (package / "src/__pycache__/x.pyc").write_text("ignored")
    assert project.key(command) == first
    (package / "src/x.py").write_text("A = 2\n")
    assert project.key(command).digest != first.digest


def test_missing_key_file(project: Project) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.txt"):
        project.key(key_files=("nothing.txt",))
    (project.home / "requirements.txt").unlink()
    with pytest.raises(NotFoundError, match=r"requirements\.txt"):
        project.key()


def resolved(project: Project, command: list[str], limit_s: float = 60) -> resolver.Resolution:
    target = install_roots.find(command, project.environ, str(project.home))
    assert target.python is not None
    python = target.python.executable
    asked = resolver.Resolution(
        target.installs, python, project.environ, str(project.home), limit_s
    )
    asked.lock()
    return asked


def test_unpinned_requirements_resolve_to_a_lock(project: Project, wheels: Path) -> None:
    (project.home / "requirements.txt").write_text("bootseer-alpha\n")
    command = [project.command[0], "install", "--no-index", f"--find-links={wheels}"]
    command += ["-r", "requirements.txt"]
    key_before = project.key(command)
    assert not key_before.closed
    first = resolved(project, command).lock()
    assert first is not None
    assert first.pinned == {"bootseer-alpha": "1.0"}
    assert resolved(project, command).lock() == first
    make_wheel(wheels, "bootseer_alpha", "2.0")
    second = resolved(project, command).lock()
    assert second is not None
    assert second.pinned == {"bootseer-alpha": "2.0"}
    assert second.digest != first.digest
    assert project.key(command) == key_before, "the key is a function of its inputs"


def test_what_cannot_be_resolved_is_said_so(project: Project, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [project.command[0], "install", "--no-index", f"--find-links={empty}", "none-such"]
    asked = resolved(project, command)
    assert asked.lock() is None
    assert asked.why == "`uv pip compile` could not resolve them"
    assert resolved(project, command, 0).why == "--resolve-timeout is 0"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    make_wheel(folder, "bootseer_alpha", "1.0")
    return folder


def test_lists_that_settings_name_are_resolved_with_the_rest(
    project: Project, wheels: Path
) -> None:
    make_wheel(wheels, "bootseer_beta", "1.0")
    (project.home / "more.txt").write_text("bootseer-beta\n")
    project.environ["PIP_REQUIREMENT"] = "more.txt"
    words = ["install", "--no-index", f"--find-links={wheels}", "bootseer-alpha"]
    lock = resolved(project, [project.command[0], *words]).lock()
    assert lock is not None
    assert lock.pinned == {"bootseer-alpha": "1.0", "bootseer-beta": "1.0"}
