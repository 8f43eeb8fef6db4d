"""What `deps run` reads from an install's words, lists and projects; and what it leaves alone."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.depsnap.key import (
    install_roots,
    local_packages,
    requirements,
    resolver,
    shell_script,
    snapshot_key,
    uv_config,
)
from bootseer.depsnap.key.install_command import plan
from bootseer.depsnap.key.tool_options import FLAGS, VALUED
from bootseer.errors import UsageError
from tests.support.commands.deps_node import Node, uv
from tests.support.samples.wheels import make_wheel

ENVIRON = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    wheels = tmp_path / "wheels"
    for name in ("bootseer_alpha", "bootseer_beta"):
        make_wheel(wheels, name, "1.0")
    return Node(tmp_path, wheels)


def shell(text: str, *options: str) -> list[str]:
    return ["bash", *options, "-c", text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("false; true", [False, True]),
        ("false && true", [True, True]),
        ("false || true", [False, False]),
        ("false || exit 3; true", [True, True, True]),
        ("true && false || exit; true", [True, True, True, True]),
        ("false || exit 0; true", [False, False, True]),
        ("false || exit 256; true", [False, False, True]),
        ("false || exit $?; true", [True, True, True]),
        ("set -e; false; true", [False, True, True]),
        ("set -e\nfalse && true\ntrue", [False, False, True, True]),
        ("set -e; set +e; false; true", [False, True, False, True]),
        ("false | true", [False, True]),
        ("set -o pipefail; false | true", [False, True, True]),
        ("set -euo pipefail; false | true; true", [False, True, True, True]),
        ("false\n\n", [True]),
    ],
)
def test_whose_failure_a_script_shows(text: str, shown: list[bool]) -> None:
    """And so does a shell, where each `false` is said to show."""
    found = shell_script.parse(text)
    assert found.plain
    assert [part.failure_shows for part in found.parts] == shown
    code = subprocess.run(["bash", "-c", text], check=False).returncode
    failing = [part for part in found.parts if part.words == ("false",)]
    assert code or not all(part.failure_shows for part in failing)


@pytest.mark.parametrize(
    "text",
    [
        "pip install a; pip install b",
        "pip install a || true",
        "pip install a || pip install b",
        "pip install a\npip install b",
        "pip install a | cat",
        "set -e; pip install a && pip install b; echo done",
        "cd /x; pip install a",
        "[ -e flag ] && pip install b; pip install a",
        "if true; then pip install a; fi",
        "for p in a b; do pip install $p; done",
        "pip install a & wait",
        "{ pip install a; }",
        "pip install $PWD/src",
        "pip install ~/src",
        'pip install -e "$PWD"',
        "pip install libs/*",
        "pip install dist/p-{1,2}.tar.gz",
        'pip install "$@"',
        "REQUIRED='-r r.txt'; pip install $REQUIRED",
        "pip install --target $DIR a",
        "python -m venv $DIR",
        "python -m venv a b",
        "uv pip compile r.in -o r.txt && uv pip sync r.txt",
        "echo $PACKAGE > r.txt && pip install -r r.txt",
        "echo a | tee r.txt && pip install -r r.txt",
        "uv export -o r.txt && pip install -r r.txt",
        "pip wheel -w w ./src && pip install -f w p",
        "uv lock && uv sync",
        "uv version 2.0 && uv sync",
        "pip config set global.index-url x && pip install a",
        "exec pip install a; pip install b",
        "export HOME=$PWD/home; pip install --user a",
        "pip install --targ DIR a",
        "pip install --requirem r.txt",
        "pip install --isolated a",
        "pip install --dry-run a",
        "uv sync --script x.py",
        "uv sync --active",
        "uv pip install --torch-backend=auto torch",
        "pip install --src there -e git+https://h/p#egg=p",
        "cat r.txt | pip install -r /dev/stdin",
        "pip install -r /dev/stdin <<< six",
        "set -o noglob; pip install a",
        "cd $OLDPWD && pip install .",
        '[ "$GPU" = 1 ] && pip install a',
        "test -f flag && pip install a",
        "grep -q x flag && pip install a",
        "cat r.txt && pip install a",
        'echo "$PACKAGES" | uv pip install -r -',
        "pip install -r - < r.txt",
        "export PIP_FIND_LINKS=/w/$FLAVOR && pip install a",
        "PIP_INDEX_URL=https://h/$FLAVOR pip install a",
        'set -e; F="$(cat flavor)"; pip install --find-links w/$F a',
        'pip install --index-url "https://h/$(cat flavor)" a',
        "export CFLAGS=$FLAGS; pip install a",
        "export SETUPTOOLS_SCM_PRETEND_VERSION_FOR_A=$REL && pip install ./a",
        "PBR_VERSION=$REL pip install ./a",
        'echo "$(pip install --target o b)"; pip install a',
        ': "${V:=1}"; pip install a==$V',
        "true || set -e; pip install a; pip install b",
        "uv sync $ARGUMENTS",
        "D=/x; bash -c \"pip install --target '$D' a\"",
        "export BASH_ENV=x; bash -c 'pip install a'",
        "python -m venv --upgrade-deps v",
        "pip install a || exit $CODE; pip install b",
        "set -e; ls flag && pip install a; pip install b",
        "which nvcc && pip install a",
        'set -e; echo "$GPU" | grep -q 1 && pip install a; pip install b',
        "pip install a | cat flag && pip install b",
        "set -e; pip install b; true && exit 0; pip install a",
        "pip install a && exit $CODE",
        "cd .. && pip install -r r.txt",
        "bash -c 'cd a && pip install -r r.txt' && pip install -r r.txt",
        "export CDPATH=/p; cd a && pip install -r r.txt",
        "export $VARIABLES; pip install a",
        "export $NAME=c.txt; pip install a",
        "export PIP_CONSTRAINT+=' d.txt'; pip install a",
        'printf -v V %s "$X"; pip install --no-deps a==$V',
        "echo $[V=N]; pip install --no-deps a==$V",
        'printf %d "$X" && pip install a',
        "./echo && pip install -r r.txt",
        'pip install a > "$(pip install b)"',
        "export PIP_TARGET=/x | cat; pip install a",
        "pip list --log r.txt && pip install -r r.txt",
        "pip install 'a",
    ],
)
def test_what_words_do_not_tell_whole_runs_plainly(tmp_path: Path, text: str) -> None:
    environ = {**ENVIRON, "PWD": str(tmp_path)}

    def read() -> None:
        target = install_roots.find(shell(text), environ, str(tmp_path))
        requirements.read_inputs(target.installs, str(tmp_path), environ)

    with pytest.raises(UsageError, match="--also"):
        read()
    assert install_roots.find(shell(text), ENVIRON, str(tmp_path), [str(tmp_path / "x")]).roots


@pytest.mark.parametrize(
    "text",
    [
        "set -e\npython3 -m venv v\nv/bin/pip install -qU a\necho done",
        "echo begin; pip install 'a[b]>1' -r r.txt > log 2>&1",
        "pip install uvicorn[standard]",
        "cd . || exit 1; pip install a",
        "set -eEuo pipefail; umask 022; pip install a",
        "set -o pipefail; pip install a 2>&1 | tee log",
        "pip list; set -e; pip --version; pip install -qr r.txt",
        "pip install torch==$VERSION --extra-index-url https://$HOST/simple",
        "umask 022 && python -W ignore -m pip install a",
        "uv --no-config pip install --system a",
    ],
)
@pytest.mark.parametrize("options", [[], ["-eo", "pipefail"]])
def test_what_words_tell_whole_is_kept(tmp_path: Path, text: str, options: list[str]) -> None:
    plain = "pip list" not in text or options
    installs = plan(shell(text, *options))
    assert installs
    assert not any(install.tool == "other" for install in installs)
    assert [bool(install.doubt) for install in installs] == [not plain] * len(installs)


@pytest.mark.parametrize("name", ["sh", "bash"])
def test_all_output_goes_to_a_file_where_the_shell_knows_that(tmp_path: Path, name: str) -> None:
    """Another shell runs the install in the background."""
    (install,) = plan([name, "-c", "pip install a &> log"])
    assert bool(install.doubt) == (name == "sh")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"BASH_ENV": "x"}, "BASH_ENV"),
        ({"UV_TORCH_BACKEND": "auto"}, "goes by the GPU"),
        ({"CDPATH": "/x"}, "CDPATH"),
        ({"BASH_FUNC_uv%%": "() { true; }"}, "functions of a shell"),
        ({"SHELLOPTS": "noglob"}, "options"),
    ],
)
def test_variables_that_let_a_command_do_more_are_refused(
    tmp_path: Path, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        install_roots.find(
            shell("cd x && uv pip install a"), {**ENVIRON, **variables}, str(tmp_path)
        )
    others = {"BASH_FUNC_module%%": "() { true; }"}
    assert install_roots.find(
        shell("cd x && pip install a"), {**ENVIRON, **others}, str(tmp_path)
    ).roots


@pytest.mark.parametrize("name", ["PIP_SRC", "PIP_REPORT"])
def test_what_pip_writes_elsewhere_by_a_setting_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="`src` or a `report`"):
        install_roots.find(["pip", "install", "-r", "a"], {**ENVIRON, name: "/x"}, str(tmp_path))


def test_variables_in_requirements_are_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    installs = plan(shell("pip install --no-deps $A torch==$V"))
    environ = {"A": "six==1 idna==2", "V": "3"}
    found = requirements.read_inputs(installs, str(tmp_path), environ)
    assert found.pinned == {"six": "1", "idna": "2", "torch": "3"}
    for value in ("-r r.txt", "./src", "src/", "p.whl", "~"):
        with pytest.raises(UsageError, match="--also"):
            requirements.read_inputs(installs, str(tmp_path), {"A": value})


def labels(command: list[str], place: Path, **variables: str) -> set[tuple[str, str]]:
    found = requirements.read_inputs(plan(command), str(place), variables)
    return set(found.digests.items())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-r", "r.txt"], "p @ file://{home}/wheels/p-1.whl"),
        (["-r", "r.txt"], "p[x] @ file:{home}/wheels/p-1.whl ; python_version > '3'"),
        (["-r", "r.txt"], "wheels/p-1.whl"),
        (["-r", "r.txt"], "p-1.tar.gz --hash=sha256:00"),
        (["-r", "r.txt"], "--pre -r more.txt"),
        (["-r", "r.txt"], "-e src"),
        (["-r", "r.txt"], "-e file://{home}/src#egg=p"),
        (["-c", "r.txt", "six"], "p @ file://{home}/wheels/p-1.whl"),
        (["-e", "file://{home}/src#egg=p"], ""),
        (["-e", "p @ file://{home}/src"], ""),
        (["-e", "./src#egg=p"], ""),
        (["p @ file://{home}/wheels/p-1.whl"], ""),
        (["p-1.tar.gz"], ""),
        (["wheels/p-1.whl"], ""),
        (["--group", "dev"], ""),
        (["--group", "sub/pyproject.toml:dev"], ""),
    ],
)
def test_a_local_package_counts_however_it_is_named(
    tmp_path: Path, words: list[str], line: str
) -> None:
    places = ["wheels/p-1.whl", "p-1.tar.gz", "more.txt", "src/setup.py", "pyproject.toml"]
    places.append("sub/pyproject.toml")
    for name in places:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "r.txt").write_text(line.format(home=tmp_path) + "\n")
    command = ["pip", "install", *(word.format(home=tmp_path) for word in words)]
    before = labels(command, tmp_path)
    for name in places:
        (tmp_path / name).write_text("# another\n")
    assert before
    assert {n for n, _ in before} == {n for n, _ in labels(command, tmp_path)}
    assert len(before - labels(command, tmp_path)) == 1


def test_an_editable_package_of_another_checkout_is_another(tmp_path: Path) -> None:
    """The environment holds its path: it led to another job's code."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text("[project]\nname='p'\n")
        (tmp_path / name / "r.txt").write_text("-e .\n")
        for words in ("pip install -e .", "pip install -r r.txt", "uv sync"):
            here = frozenset(labels(words.split(), tmp_path / name))
            found.append((words, here))
    assert len(set(found)) == len(found)


def test_an_editable_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot tell which directory"):
        labels(["pip", "install", "-e", "nowhere"], tmp_path)


def test_local_packages_that_local_packages_need_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/pyproject.toml").write_text(
        f"[project]\nname='a'\ndependencies=['b @ file://{tmp_path}/b']\n"
    )
    for words in (["pip", "install", "./a"], ["pip", "install", "-e", "./a"]):
        before = labels(words, tmp_path)
        (tmp_path / "b/b.py").write_text(f"{words}")
        assert labels(words, tmp_path) != before


def test_the_list_that_is_read_is_found_behind_links(tmp_path: Path) -> None:
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "here").symlink_to(tmp_path / "other/deep")
    (tmp_path / "r.txt").write_text("six\n")
    (tmp_path / "other/r.txt").write_text("idna==1\n")
    for command in (
        shell("cd here && pip install -r ../r.txt"),
        ["pip", "install", "-r", "here/../r.txt"],
    ):
        assert requirements.read_inputs(plan(command), str(tmp_path)).pinned == {"idna": "1"}


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("https://h/p/archive/main.zip", True),
        ("p @ https://h/p.tar.gz", True),
        ("p @ https://h/p.tar.gz#sha256=00", False),
        ("https://h/p/archive/v1.2.tar.gz", False),
        ("https://h/p-1.0-py3-none-any.whl", False),
        ("git+https://h/p.zip", False),
        ("https://h/p/releases/download/nightly/p.tar.gz", True),
        ("https://h/p/archive/refs/tags/nightly.tar.gz", True),
        ("https://h/p/releases/download/v1.2/p.tar.gz", False),
        ("http://10.0.0.5/o/p/archive/main.tar.gz", True),
        ("http://h/py3.11/o/p/main.tar.gz", True),
        ("https://h/o/p/zipball/main#egg=p-1.0", True),
        (f"https://h/o/p/archive/{'0a' * 20}.zip", False),
    ],
)
def test_an_archive_that_may_be_another_tomorrow_is_refused(
    tmp_path: Path, word: str, *, refused: bool
) -> None:
    (tmp_path / "r.txt").write_text(f"{word}\n")
    for words in ([word], ["-r", "r.txt"]):
        if refused:
            with pytest.raises(UsageError, match="sha256"):
                labels(["pip", "install", *words], tmp_path)
        else:
            labels(["pip", "install", *words], tmp_path)


def test_an_editable_repository_outside_an_environment_is_refused(tmp_path: Path) -> None:
    """It is cloned into ./src, which no root holds."""
    pip = [sys.executable, "-m", "pip", "install"]
    for words in (["-e", "git+https://h/p#egg=p"], ["-r", "r.txt"]):
        (tmp_path / "r.txt").write_text("-e git+https://h/p#egg=p\n")
        target = install_roots.find([*pip, "--target", "t", *words], ENVIRON, str(tmp_path))
        with pytest.raises(UsageError, match="cloned beside"):
            snapshot_key.make(
                snapshot_key.Question([*pip, *words], [], target, "", ENVIRON, str(tmp_path))
            )
        kept = install_roots.find([*pip, *words], ENVIRON, str(tmp_path))
        if sys.prefix != sys.base_prefix:
            snapshot_key.make(
                snapshot_key.Question([*pip, *words], [], kept, "", ENVIRON, str(tmp_path))
            )


def test_a_list_with_one_hash_is_closed_for_none(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("a==1 --hash=sha256:00\nb\n")
    pip, by_uv = ["pip", "install", "-r", "r.txt"], ["uv", "pip", "install", "-r", "r.txt"]

    def is_open(command: list[str]) -> bool:
        return requirements.read_inputs(plan(command), str(tmp_path)).open_ended

    assert is_open(pip)
    assert is_open(by_uv)
    (tmp_path / "r.txt").write_text("a==1 \\\n  --hash=sha256:00\nb==1 --hash=sha256:01\n")
    assert not is_open(pip)
    assert is_open(by_uv)  # which does not demand one of what these need
    assert not is_open([*by_uv, "--require-hashes"])
    assert not is_open(["uv", "pip", "sync", "r.txt"])


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, stdout=subprocess.DEVNULL)


def commit(folder: Path, name: str) -> None:
    git(folder, "commit", "-q", "--allow-empty", "-m", name)


def digests(package: Path) -> tuple[str, str]:
    return local_packages.source_digest(str(package)), local_packages.editable_digest(str(package))


LOOKING = {
    "setuptools-scm": "[build-system]\nrequires = ['setuptools', 'setuptools_scm>=8']\n",
    "hatch-vcs": "[build-system]\nrequires = ['hatchling', 'hatch-vcs']\n",
    "pdm": "[build-system]\nrequires = ['pdm-backend']\n[tool.pdm.version]\nsource = 'scm'\n",
    "uv": "[build-system]\nrequires = ['hatchling', 'uv-dynamic-versioning']\n",
    "poetry": "[build-system]\nrequires = ['poetry-core', 'poetry-dynamic-versioning']\n",
    "own": "[build-system]\nrequires = []\nbuild-backend = 'own'\nbackend-path = ['.']\n",
    "own hook": "[build-system]\nrequires = ['hatchling']\n[tool.hatch.build.hooks.custom]\n",
    "unreadable": "[build-system\n",
    "pdm call": "[build-system]\nrequires = ['pdm-backend']\n[tool.pdm.version]\nsource = 'call'\n",
    "poetry script": "[build-system]\nrequires = ['poetry-core']\n"
    "[tool.poetry.build]\nscript = 'ext.py'\n",
    "a value that is computed": "[build-system]\nrequires = ['setuptools']\n"
    "[tool.setuptools.dynamic]\nversion = {attr = 'a.get_version'}\n",
    "poetry's script": "[build-system]\nrequires = ['poetry-core']\n"
    "[tool.poetry]\nbuild = 'compile.py'\n",
    "a value that flit asks a module for": "[build-system]\nrequires = ['flit_core']\n"
    "build-backend = 'flit_core.buildapi'\n[project]\nname = 'a'\ndynamic = ['version']\n",
    "hooks behind a sign": "[build-system]\nrequires = ['hatchling']\n"
    "[tool.hatch.version]\npath = 'a #.py'\n[tool.hatch.build.hooks.custom]\n",
}
INDEPENDENT = {
    "setuptools": "[build-system]\nrequires = ['setuptools>=61', 'wheel']\n",
    "hatchling": "[build-system]\nrequires = ['hatchling']\n",
    "poetry": "[build-system]\nrequires = ['poetry-core~=1.0']\n",
    "uv": "[build-system]\nrequires = ['uv_build>=0.9,<0.10']\n"
    "[tool.uv.sources]\na = { git = 'https://h/a.git' }\n",
    "addresses": "[project]\nname = 'a'\ndependencies = ['b @ git+https://h/b']\n"
    "[project.urls]\nsource = 'https://github.com/o/a.git'\n",
    "what no build reads": "[project]\nname = 'a'\ndescription = 'A git tool'\n"
    "[dependency-groups]\ndev = ['pre-commit-hooks']\n"
    "[tool.coverage.run]\npatch = ['subprocess']\n# our pre-commit hook\n",
    "hatch": "[build-system]\nrequires = ['hatchling']\n[tool.hatch.build]\nignore-vcs = true\n",
    "poetry's dependencies": "[build-system]\nrequires = ['poetry-core']\n"
    "[tool.poetry.dependencies]\nb = { git = 'https://h/b' }\n",
}


@pytest.mark.parametrize("described", [*LOOKING.values(), *INDEPENDENT.values()])
def test_what_git_tells_a_build_is_part_of_a_package(tmp_path: Path, described: str) -> None:
    package = tmp_path / "repository/package"
    package.mkdir(parents=True)
    git(package.parent, "init", "-q")
    (package / "pyproject.toml").write_text(described)
    git(package.parent, "add", ".")
    seen = []
    for step in (["commit", "-q", "-m", "1"], ["tag", "v1"], ["pack-refs", "--all"], ["gc", "-q"]):
        git(package.parent, *step)
        seen.append(digests(package))
    commit(package.parent, "2")
    seen.append(digests(package))
    counted = described in LOOKING.values()
    for kind in range(2):
        first, tagged, packed, collected, second = (each[kind] for each in seen)
        assert tagged == packed == collected  # which no build can tell apart
        assert (first != tagged) is counted
        assert (tagged != second) is counted


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("from setuptools import setup\nsetup(url='https://github.com/o/a.git')\n", False),
        ("from setuptools import setup\nsetup(name='a', use_scm_version=True)\n", True),
        ("import os\nv = os.popen('git rev-parse HEAD').read()\n", True),
        ("import a.version\n", True),
        ("import os, buildinfo\n", True),
        ("exec(open('a/version.py').read())\n", True),
        ("import os\nos.system('/usr/bin/git describe > v')\n", True),
        ("head = open('.git/HEAD').read()\n", True),
        ("from setuptools import setup\nsetup(cmdclass={})\n", True),
        ("from version import get_git_version\nv = get_git_version()\n", True),
        ("from importlib.machinery import SourceFileLoader\n", True),
        ("from . import version\n", True),
        ("setup(url='https://h/a',use_scm_version=True)\n", True),
        ("setup(\n", True),
        (
            '"""\nimport this, then that,\n"""  # by git\nimport setuptools; setuptools.setup()\n',
            False,
        ),
        ("import re\nimport setuptools\nv = re.compile('x')\n", False),
        ("import logging\nfrom itertools import chain\nfrom setuptools import setup\n", False),
    ],
)
def test_a_setup_that_may_look_at_git(tmp_path: Path, text: str, *, counted: bool) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "setup.py").write_text(text)
    commit(tmp_path, "1")
    before = digests(tmp_path)
    commit(tmp_path, "2")
    assert (digests(tmp_path)[0] != before[0]) is counted
    assert (digests(tmp_path)[1] != before[1]) is counted


def test_a_version_that_a_module_gives(tmp_path: Path) -> None:
    """In so many words, or by what may look at git."""
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\n[tool.setuptools.dynamic]\n"
        "version = {attr = 'a.__version__'}\n"
    )
    module = tmp_path / "src/a/__init__.py"
    module.parent.mkdir(parents=True)
    seen = []
    for text, literal in (
        ("__version__ = '1'\n", True),
        ("__version__: str = '2'\n", True),
        ("from .b import __version__\n", False),
        ("__version__ = '1+' + commit()\n", False),
    ):
        module.write_text(text)
        commit(tmp_path, text)
        seen.append(local_packages.editable_digest(str(tmp_path)))
        commit(tmp_path, "again")
        assert (local_packages.editable_digest(str(tmp_path)) == seen[-1]) is literal
    assert len(set(seen)) == 4


@pytest.mark.parametrize("kind", ["folder", "dangling", "pipe"])
def test_what_is_called_like_a_description_is_no_error(tmp_path: Path, kind: str) -> None:
    before = local_packages.editable_digest(str(tmp_path))
    place = tmp_path / "VERSION"
    if kind == "folder":
        place.mkdir()
    elif kind == "dangling":
        place.symlink_to("nowhere")
    else:
        os.mkfifo(place)
    assert local_packages.editable_digest(str(tmp_path)) == before


def test_a_repository_of_mercurial_within_one_of_git_is_the_one_that_counts(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q")
    package = tmp_path / "package"
    (package / ".hg").mkdir(parents=True)
    (package / "pyproject.toml").write_text(LOOKING["setuptools-scm"])
    with pytest.raises(UsageError, match="Mercurial"):
        local_packages.source_digest(str(package))
    (package / "pyproject.toml").write_text(INDEPENDENT["hatchling"])
    assert local_packages.source_digest(str(package))


def test_two_tags_of_one_commit_count_as_two(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text(LOOKING["setuptools-scm"])
    commit(tmp_path, "1")
    seen = []
    for name in ("v1.0rc1", "v1.0", "another"):
        git(tmp_path, "tag", name)
        git(tmp_path, "pack-refs", "--all")
        seen.append(digests(tmp_path))
    assert len(set(seen)) == 3


def test_a_branch_that_stands_for_another_is_followed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "pyproject.toml").write_text(LOOKING["setuptools-scm"])
    commit(tmp_path, "1")
    git(tmp_path, "symbolic-ref", "refs/heads/alias", "refs/heads/main")
    git(tmp_path, "symbolic-ref", "HEAD", "refs/heads/alias")
    before = digests(tmp_path)
    commit(tmp_path, "2")
    assert digests(tmp_path) != before


def test_what_git_ignores_above_a_package_counts(tmp_path: Path) -> None:
    """hatchling and poetry leave it out of what they build, and without git they do not."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "pyproject.toml").write_text(INDEPENDENT["hatchling"])
    seen = [digests(package)]
    git(tmp_path, "init", "-q")
    seen.append(digests(package))
    (tmp_path / ".gitignore").write_text("data\n")
    seen.append(digests(package))
    assert len(set(seen)) == 3


def test_the_same_commit_is_the_same_in_each_checkout(tmp_path: Path) -> None:
    """In a clone, a worktree and one whose other branches are others."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    (origin / "pyproject.toml").write_text(LOOKING["setuptools-scm"])
    git(origin, "add", ".")
    commit(origin, "1")
    git(origin, "tag", "-a", "v1", "-m", "v1")
    before = local_packages.source_digest(str(origin))
    git(origin, "branch", "other")
    assert local_packages.source_digest(str(origin)) == before
    git(tmp_path, "clone", "-q", "origin", "clone")
    assert local_packages.source_digest(str(tmp_path / "clone")) == before
    git(origin, "worktree", "add", "-q", "-b", "third", str(tmp_path / "worktree"))
    tree = tmp_path / "worktree"
    seen = [local_packages.source_digest(str(tree))]
    commit(tree, "2")
    seen.append(local_packages.source_digest(str(tree)))
    git(origin, "tag", "v2")
    seen.append(local_packages.source_digest(str(tree)))
    assert len({before, *seen}) == 4  # the branch has another name, which a version may have too
    shutil.rmtree(origin / ".git")
    (origin / ".hg").mkdir()
    with pytest.raises(UsageError, match="Mercurial"):
        local_packages.source_digest(str(origin))


def test_a_shortened_option_in_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("--requirem more.txt\n")
    with pytest.raises(UsageError, match="--requirem is not known"):
        labels(["pip", "install", "-r", "r.txt"], tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_list_with_a_byte_order_mark_includes_what_it_names(
    tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "r.txt").write_text("-r more.txt\r\nsix\n", encoding=encoding)
    assert (tmp_path / "r.txt").read_bytes().startswith((codecs.BOM_UTF8, b"\xff\xfe"))
    (tmp_path / "more.txt").write_text("idna\n")
    found = labels(["pip", "install", "-r", "r.txt"], tmp_path)
    assert {name for name, _ in found} == {"file r.txt", "file more.txt"}


@pytest.mark.parametrize("place", ["p/build", "p/dist", "linked"])
def test_a_packages_own_folders_count_whatever_they_are_called(tmp_path: Path, place: str) -> None:
    package, elsewhere = tmp_path / "src", tmp_path / "elsewhere"
    (package / "p").mkdir(parents=True)
    elsewhere.mkdir()
    if place == "linked":
        (package / "linked").symlink_to(elsewhere)
        (elsewhere / "loop").symlink_to(package)
    else:
        (package / place).mkdir()
    before = local_packages.source_digest(str(package))
    (package / place / "m.py").write_text("x = 1\n")
    assert local_packages.source_digest(str(package)) != before
    (package / "build").mkdir()
    now = local_packages.source_digest(str(package))
    (package / "build/left").write_text("by a build")
    assert local_packages.source_digest(str(package)) == now


@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("options", [[], ["--no-editable"]])
def test_sources_of_a_uv_project_count(tmp_path: Path, options: list[str], *, lock: bool) -> None:
    (tmp_path / "b/src").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    described = "[project]\nname='a'\n[tool.uv.sources]\nb = { path = '../b' }\n"
    (tmp_path / "a/pyproject.toml").write_text(described)
    (tmp_path / "a/a.py").write_text("")
    (tmp_path / "b/pyproject.toml").write_text("[project]\nname='b'\n")
    (tmp_path / "b/b.py").write_text("")
    if lock:
        (tmp_path / "a/uv.lock").write_text(
            'source = { editable = "." }\nsource = { directory = "../b" }\n'
        )
    command = ["uv", "sync", *options]
    before = labels(command, tmp_path / "a")
    (tmp_path / "b/b.py").write_text("x = 1\n")
    assert labels(command, tmp_path / "a") != before
    before = labels(command, tmp_path / "a")
    (tmp_path / "a/a.py").write_text("x = 1\n")
    assert (labels(command, tmp_path / "a") != before) == bool(options)
    for words in (["-r", "pyproject.toml"], ["."], ["-e", "."], ["--group", "dev"]):
        before = labels(["uv", "pip", "install", *words], tmp_path / "a")
        (tmp_path / "b/b.py").write_text(f"{words}\n")
        assert labels(["uv", "pip", "install", *words], tmp_path / "a") != before


@pytest.mark.parametrize("word", ["-U", "-Pb", "--upgrade-package=b", "--resolution=lowest"])
def test_a_lock_that_is_made_anew_is_an_indexs_to_decide(tmp_path: Path, word: str) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname='x'\n")
    (tmp_path / "uv.lock").write_text("")
    assert not requirements.read_inputs(plan(["uv", "sync"]), str(tmp_path)).open_ended
    assert requirements.read_inputs(plan(["uv", "sync", word]), str(tmp_path)).open_ended


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uv.toml", "pip.target = 't'"),
        ("uv.toml", "pip = { target = 't' }"),
        ("uv.toml", "[pip]\nsystem = true"),
        ("pyproject.toml", "[tool.uv]\npip.prefix = 't'"),
        ("pyproject.toml", "[tool.uv.pip]\ntarget = 't'"),
        ("../pyproject.toml", "[tool.uv.pip]\ntarget = 't'"),
    ],
)
def test_settings_of_uv_that_name_the_place_are_seen(tmp_path: Path, name: str, text: str) -> None:
    place = tmp_path / "here"
    place.mkdir()
    (place / "pyproject.toml").write_text("[project]\nname='x'\n")
    find = ["uv", "pip", "install", "--python", sys.executable, "six"]
    assert install_roots.find(find, ENVIRON, str(place)).roots
    (place / name).write_text(text)
    with pytest.raises(UsageError, match="uv's settings"):
        install_roots.find(find, ENVIRON, str(place))
    (place / name).write_text("[pip]\nsystem = false\n" if name == "uv.toml" else "")
    assert install_roots.find(find, ENVIRON, str(place)).roots


def test_places_that_options_and_variables_name_together(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "six"]

    def paths(*words: str, **variables: str) -> list[str]:
        return install_roots.find([*pip, *words], {**ENVIRON, **variables}, str(tmp_path)).paths

    assert paths("--root", "/r", "--prefix", "/p") == ["/r"]
    assert paths("--prefix", "/p", PIP_ROOT="/r") == ["/r"]
    assert paths("--user", PYTHONUSERBASE="/base") == ["/base"]
    with pytest.raises(UsageError, match="UV_PROJECT_ENVIRONMENT"):
        install_roots.find(
            ["uv", "venv"], {**ENVIRON, "UV_PROJECT_ENVIRONMENT": "/x"}, str(tmp_path)
        )
    named = {**ENVIRON, "UV_PROJECT_ENVIRONMENT": "/x"}
    assert install_roots.find(["uv", "venv", "/x"], named, str(tmp_path)).paths == ["/x"]
    assert install_roots.find(["uv", "venv", ".venv"], named, str(tmp_path)).paths
    with pytest.raises(UsageError, match="UV_PROJECT_ENVIRONMENT"):
        install_roots.find(["uv", "venv", "--prompt", ".venv"], named, str(tmp_path))


def test_a_workspace_decides_for_its_members(tmp_path: Path) -> None:
    """By its lock alone, its sources, and members that the lock does not know yet."""
    root = "[project]\nname='r'\n[tool.uv.workspace]\nmembers=['p/*']\n"
    root += "[tool.uv.sources]\na = { path = 'libs/a' }\n"
    for name in ("p/m", "libs/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").write_text("[project]\nname='m'\n")
    (tmp_path / "pyproject.toml").write_text(root)
    for place in ("", "p/m"):
        (tmp_path / place / "uv.lock").write_text("version = 1\n")
    sync = ["uv", "sync", "--project", "p/m"]
    before = labels(sync, tmp_path)
    (tmp_path / "p/m/uv.lock").write_text("version = 2\n")
    assert labels(sync, tmp_path) == before
    (tmp_path / "uv.lock").write_text("version = 2\n")
    assert labels(sync, tmp_path) != before
    before = labels(sync, tmp_path)
    (tmp_path / "p/new").mkdir()
    (tmp_path / "p/new/pyproject.toml").write_text("[project]\nname='new'\n")
    assert labels(sync, tmp_path) != before
    install = ["uv", "pip", "install", "./p/m"]
    before = labels(install, tmp_path)
    (tmp_path / "libs/a/a.py").write_text("x = 1\n")
    assert labels(install, tmp_path) != before


def test_a_foreign_lock_above_closes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in (".", "sub"):
        (tmp_path / name / "pyproject.toml").write_text("[project]\nname='x'\n")
    (tmp_path / "uv.lock").write_text("")
    found = requirements.read_inputs(plan(["uv", "sync", "--project", "sub"]), str(tmp_path))
    assert found.open_ended


def test_what_uv_makes_of_an_environment_is_in_the_key(tmp_path: Path) -> None:
    described = tmp_path / "pyproject.toml"
    described.write_text("[project]\nname='x'\nrequires-python='>=3.8'\n")
    before = labels(["uv", "venv"], tmp_path)
    described.write_text("[project]\nname='x'\nversion='2'\nrequires-python='>=3.8'\n")
    assert labels(["uv", "venv"], tmp_path) == before
    described.write_text("[project]\nname='x'\nrequires-python='>=3.12'\n")
    assert labels(["uv", "venv"], tmp_path) != before
    assert not requirements.read_inputs(plan(["uv", "venv"]), str(tmp_path)).open_ended
    assert requirements.read_inputs(plan(["uv", "venv", "--seed"]), str(tmp_path)).open_ended


def test_a_project_without_settings_of_uv_is_none_of_its_settings(tmp_path: Path) -> None:
    described = tmp_path / "pyproject.toml"
    described.write_text("[project]\nname='x'\ndependencies=['uvicorn']\n")
    assert str(described) not in uv_config.settings_upwards(str(tmp_path))
    described.write_text("[project]\nname='x'\n[tool.uv]\nindex-strategy='first-index'\n")
    assert str(described) in uv_config.settings_upwards(str(tmp_path))


def test_an_environment_within_a_package_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    before = local_packages.source_digest(str(tmp_path))
    (tmp_path / "env").mkdir()
    (tmp_path / "env/pyvenv.cfg").write_text("")
    (tmp_path / "env/bin").mkdir()
    (tmp_path / "env/x.py").write_text("")
    assert local_packages.source_digest(str(tmp_path)) == before


@pytest.mark.parametrize(
    ("words", "told", "unknown"),
    [
        ("-r pyproject.toml --extra dev --all-extras", "--extra dev --all-extras", ""),
        ("--group test -cx.txt --override o.txt -U", "--group test --constraints x.txt", ""),
        ("--pre -i https://h a", "--prerelease allow --index-url https://h", ""),
        ("--pre pip a", "--prerelease allow", ""),
        ("--only-binary=:all: --target t a", "--only-binary :all:", ""),
        ("--platform linux a", "", "--platform"),
        ("--no-build-package b a", "", "--no-build-package"),
    ],
)
@pytest.mark.parametrize("tool", ["uv -q pip", "python3 -m pip", "pip"])
def test_a_resolver_is_told_what_the_install_is_told(
    tool: str, words: str, told: str, unknown: str
) -> None:
    """Its lock said that a snapshot fits which no extra or override had been asked for."""
    (install,) = plan([*tool.split(), "install", *words.split()])
    found, why = resolver._resolver_words(install)
    assert why == unknown
    assert " ".join(found).startswith(told)


@pytest.mark.parametrize("command", ["pip install", "pip sync"])
def test_a_resolver_takes_each_option_of_uv(command: str) -> None:
    """By uv's own words; those that it cannot be told are named here."""
    pages = {
        name: subprocess.run(
            [uv(), *name.split(), "--help"], capture_output=True, text=True, check=True
        ).stdout
        for name in (command, "pip compile")
    }
    options = {name: re.findall(r"(?<!\S)--[a-z][\w-]+", page) for name, page in pages.items()}
    known = [o for o in options[command] if o in (FLAGS | VALUED)]
    assert len(known) > 40
    for option in known:
        words = [option, "x"] if option in VALUED else [option]
        (install,) = plan(["uv", *command.split(), *words, "r.txt"])
        found, unknown = resolver._resolver_words(install)
        assert not unknown, option
        hidden = {"--no-config"}  # global, and on no page of a command
        assert {w for w in found if w[:2] == "--"} <= {*options["pip compile"], *hidden}, option


def test_a_resolver_reads_no_settings_where_the_install_reads_none() -> None:
    words = [uv(), "pip", "compile", "--no-config", "--help"]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.slow
def test_a_hidden_failure_is_not_kept(node: Node) -> None:
    """One of two packages was missing once, and so it would have been in each later start."""
    where = f"--no-index --find-links {node.home}/wheels"
    pip = f"{sys.executable} -m pip --python {node.place} install -q {where}"
    text = f"{pip} bootseer-alpha; {pip} bootseer-beta"
    shutil.copytree(node.wheels, node.home / "wheels")
    alpha = next((node.home / "wheels").glob("bootseer_alpha-1*"))
    for path in (node.home / "wheels").glob("bootseer_alpha*"):
        path.unlink()
    assert node.run(command=["sh", "-c", text]).returncode == 0
    assert node.last() == ("fallback", "installed")
    shutil.copy(node.wheels / alpha.name, alpha)
    done = node.run(command=["sh", "-c", text])
    assert done.returncode == 0
    assert "set -e" in done.stderr
    assert len(list(node.place.glob("lib/python3*/site-packages/bootseer_*.dist-info"))) == 2


@pytest.mark.slow
def test_another_wish_for_a_python_is_another_start(node: Node) -> None:
    shutil.rmtree(node.place)
    command = [uv(), "venv", "-q", str(node.place)]
    wish = node.home / ".python-version"
    wish.write_text(f"{sys.executable}\n")
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "published")
    wish.write_text(f"{sys.version_info[0]}.{sys.version_info[1]}\n")
    shutil.rmtree(node.place)
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "published")


@pytest.mark.slow
def test_an_environment_whose_python_is_not_here_is_passed_over(node: Node) -> None:
    """As one that uv downloaded on the node that published."""
    shutil.rmtree(node.place)
    there = node.home / "python"
    there.mkdir()
    link = there / "python3"
    link.symlink_to(os.path.realpath(sys.executable))
    command = ["sh", "-c", f"exec {link} -m venv --without-pip {node.place}"]
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "published")
    made = os.readlink(node.place / "bin/python3")
    for present in (True, False):
        shutil.rmtree(node.place)
        node.cache = node.cache.with_name(f"cache-{present}")
        if not present:
            hide_interpreter(node, made)
        done = node.run(command=command)
        assert done.returncode == 0
        assert node.last() == ("ok", "restored" if present else "published")
        assert (f"needs {made}" in done.stderr) is not present


def hide_interpreter(node: Node, path: str) -> None:
    """Fault injection: the record names an interpreter that is not on this machine."""
    (record,) = node.store.glob("deps/*/record-*.json")
    text = record.read_text()
    assert path in text
    record.write_text(text.replace(path, path + "-gone"))


@pytest.mark.parametrize(
    "described",
    [
        "tool = 1",
        "[tool.uv.sources]\na = { path = 1 }",
        '[tool.uv.sources]\na = { path = "b\\u0000" }',
        "x = " + "[" * 3000 + " # pip sources path",
        "[tool.uv]\nworkspace = 1\npip = 2",
        "not toml",
    ],
)
def test_a_project_that_cannot_be_understood_is_no_fault_of_ours(
    tmp_path: Path, described: str
) -> None:
    for name in ("pyproject.toml", "uv.toml"):
        (tmp_path / name).write_text(described + "\n# uv pip sources path\n")
    (tmp_path / "r.txt").write_text("-r file:///a%00\n")
    for words in ("uv sync", "uv pip install .", "uv pip install -e .", "uv pip install -r r.txt"):
        assert requirements.read_inputs(plan(words.split()), str(tmp_path)) is not None
        with contextlib.suppress(UsageError):
            install_roots.find(words.split(), ENVIRON, str(tmp_path))


def test_a_dependency_of_a_local_package_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b c").mkdir()
    described = tmp_path / "pyproject.toml"
    described.write_text(f"[project]\ndependencies=['b @ file://{tmp_path}/b%20c']\n")
    before = labels(["pip", "install", "."], tmp_path)
    (tmp_path / "b c/b.py").write_text("x = 1\n")
    assert labels(["pip", "install", "."], tmp_path) != before
    for address in ("file:///nowhere", "{root:uri}/../b"):
        described.write_text(f"[project]\ndependencies=['b @ {address}']\n")
        with pytest.raises(UsageError, match="cannot tell what"):
            labels(["pip", "install", "-e", "."], tmp_path)


def test_a_credential_says_not_what_is_installed(tmp_path: Path) -> None:
    """No key may hold it, so that another one would be met by the same snapshot."""
    (tmp_path / "r.txt").write_text("six==${API_KEY}\n")
    for command in (shell("pip install six==$API_KEY"), ["pip", "install", "-r", "r.txt"]):
        with pytest.raises(UsageError, match="named like a credential"):
            labels(command, tmp_path, API_KEY="1")
    assert labels(shell("pip install -i https://$TOKEN@h six"), tmp_path, TOKEN="1") == set()


@pytest.mark.slow
def test_a_lock_that_the_install_wrote_anew_is_kept_by_the_next_start(node: Node) -> None:
    """The index had decided what was restored for the old lock ever after."""
    described = node.home / "pyproject.toml"
    index = f"[tool.uv]\nno-index = true\nfind-links = ['{node.wheels}']\n"
    text = "[project]\nname='p'\nversion='1'\nrequires-python='>=3.11'\ndependencies=[{}]\n"
    described.write_text(text.format("'bootseer-alpha'") + index)
    environ = node.environ()
    words = [uv(), "sync", "-q", "--python", sys.executable]
    subprocess.run([uv(), "lock", "-q"], cwd=node.home, env=environ, check=True)
    described.write_text(text.format("'bootseer-alpha', 'bootseer-beta'") + index)
    for said, result in (("uv.lock anew", "installed"), ("", "published"), ("", "restored")):
        shutil.rmtree(node.home / ".venv", ignore_errors=True)
        done = node.run(command=words)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        assert node.last()[1] == result
        assert list(node.home.glob(".venv/lib/python3*/site-packages/bootseer_beta-1*"))
