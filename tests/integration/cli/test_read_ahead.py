"""What is read ahead for a start is what it imports, and nothing that is missing is in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.cli import read_ahead
from bootseer.depsnap.shared_tree import forms
from tests.support.commands.deps_node import Node
from tests.support.mounts.images import Mounts, mounts_below, publish, some_files, tree_of
from tests.support.samples.wheels import make_wheel

# A start as the command makes it, which then tells the files of what it has imported: of all
# modules, and of those that came after what is read ahead.
START = """
import gc, json, sys
from bootseer import __main__ as main
from bootseer.cli import read_ahead
from bootseer.cli.deps import direct as deps_direct
early = {}
prefetch_modules = read_ahead.prefetch_modules
def note_and_ask(modules):
    early.update(early or sys.modules)
    prefetch_modules(modules)
read_ahead.prefetch_modules = note_and_ask
code = deps_direct.run_without_click(sys.argv[1:])
def files(names):
    specs = [getattr(sys.modules[name], "__spec__", None) for name in names]
    return [s.cached or s.origin for s in specs if s and s.has_location]
told = [code, files(sys.modules), files(sys.modules.keys() - early.keys()), gc.isenabled()]
print(json.dumps(told))
"""

# A mount that tells the same of what its server and its registry's helper have imported when the
# tree is there, and when the helper knows all.
MOUNT = """
import os, sys
from bootseer.cli import read_ahead
from bootseer.cli.image import direct as image_direct
early, folder = {}, sys.argv[1]
prefetch_modules = read_ahead.prefetch_modules
def note_and_ask(modules):
    early.update(sys.modules)
    prefetch_modules(modules)
read_ahead.prefetch_modules = note_and_ask
def files(names):
    specs = [getattr(sys.modules[name], "__spec__", None) for name in names]
    return [s.cached or s.origin for s in specs if s and s.has_location]
def tell(who):
    told = [files(sys.modules), files(sys.modules.keys() - early.keys())]
    import json
    with open(os.path.join(folder, who), "w") as file:
        json.dump(told, file)
from bootseer.imageprefetch.resolve import registry_helper
asked, start = registry_helper._Helper._await_request, registry_helper.start
def noted_asked(self):
    tell("helper")
    return asked(self)
registry_helper._Helper._await_request = noted_asked
def noted_start(*words, **options):
    link = start(*words, **options)
    from bootseer.imageprefetch.mount import mount_worker as worker
    hand_over = worker.Worker._hand_over
    def noted(self, *about):
        tell("server")
        hand_over(self, *about)
    worker.Worker._hand_over = noted
    return link
registry_helper.start = noted_start
sys.exit(image_direct.run_without_click(sys.argv[2:]))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels)
    # A machine's pip.conf that names a constraint file is parsed, by what most starts do without.
    node.variables["PIP_CONFIG_FILE"] = os.devnull
    (node.home / "requirements.txt").write_text("bootseer-alpha==1.0\n", encoding="utf-8")
    yield node
    forms.unplace(str(node.place), str(node.cache / "trees"))


def make_empty(node: Node) -> None:
    """The environment as it was before the first start; what this node keeps stays."""
    forms.unplace(str(node.place), str(node.cache / "trees"))
    shutil.rmtree(node.place)
    node.make_venv()


def start(node: Node, what: list[str], cache: Path) -> tuple[list[str], list[str]]:
    """Files of the modules that a start imports: all, and those after it has begun to ask."""
    words = ["deps", "run", "--store", str(node.store), "--cache", str(cache), "--", *what]
    done = subprocess.run(
        [sys.executable, "-I", "-c", START, *words],
        cwd=node.home,
        env=node.environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    code, imported, late, collecting = json.loads(done.stdout)
    assert (code, done.stderr, collecting) == (0, "", True)
    assert node.last() == ("ok", "restored")
    assert node.ends()[-1]["attributes"]["bootseer.deps.form"] == "overlay"
    assert node.works()
    return imported, late


@pytest.mark.root
@pytest.mark.slow
def test_it_is_what_a_second_start_imports(node: Node) -> None:
    what = [*node.plain, "--no-deps"]
    assert node.run(cache_shared=True, command=what).returncode == 0
    make_empty(node)
    assert node.run(cache_shared=True, command=what).returncode == 0
    make_empty(node)
    imported, late = start(node, what, node.cache)
    check(read_ahead.DEPS_RUN, imported, late)


@pytest.mark.root
@pytest.mark.slow
def test_on_a_fresh_node_it_is_what_unpacking_imports_as_well(node: Node, tmp_path: Path) -> None:
    what = [*node.plain, "--no-deps"]
    assert node.run(cache_shared=True, command=what).returncode == 0
    make_empty(node)
    fresh = tmp_path / "fresh cache"
    try:
        imported, late = start(node, what, fresh)
    finally:
        forms.unplace(str(node.place), str(fresh / "trees"))
    check(read_ahead.DEPS_RUN + read_ahead.DEPS_RESTORE, imported, late)


def check(modules: Sequence[str], imported: Collection[str], late: Collection[str]) -> None:
    """That a list has all that is imported late, and of our own modules no others."""
    ahead = read_ahead.module_files(modules)
    assert len(ahead) == len(set(ahead))
    ours = [path for path in ahead if f"{os.sep}bootseer{os.sep}" in path]
    assert sorted(set(ours) - set(imported)) == []
    missed = sorted(path for path in late if path not in ahead)
    if sys.version_info[:2] != (3, 11):  # another standard library imports other parts of itself
        missed = [path for path in missed if f"{os.sep}bootseer{os.sep}" in path]
    assert missed == []


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_it_is_what_a_bare_mount_imports(registry: Any, mounts: Mounts) -> None:
    files = some_files()
    image = publish(
        registry.reference("ahead/plain", "1"), files, mounts.folder, hot={"w": sorted(files)[:12]}
    )
    directory = mounts.folder / "m"
    directory.mkdir()
    words = ["--runtime", str(mounts.runtime), "--cache", str(mounts.folder / "cache"), "--no-fill"]
    words += ["--workload", "w", image.ref, str(directory)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", MOUNT, str(mounts.folder), "image", "mount", *words],
        env={**os.environ, "BOOTSEER_EVENTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert tree_of(directory) == files
    mounts.umount(str(directory))
    imported, late = set(), set()
    for who in ("helper", "server"):
        all_files, late_files = json.loads((mounts.folder / who).read_text(encoding="utf-8"))
        imported |= set(all_files)
        late |= set(late_files)
    check(read_ahead.IMAGE_MOUNT, imported, late)


def test_every_module_of_ours_is_there() -> None:
    """One that was moved is passed over without a word."""
    listed = {*read_ahead.DEPS_RUN, *read_ahead.DEPS_RESTORE, *read_ahead.IMAGE_MOUNT}
    ours = sorted(module for module in listed if module.startswith("bootseer/"))
    root = Path(read_ahead.__file__).parents[2]
    assert [module for module in ours if not (root / f"{module}.py").is_file()] == []


def test_what_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__pycache__").mkdir()
    os.mkfifo(tmp_path / "__pycache__" / f"pipe.{sys.implementation.cache_tag}.pyc")
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    before = os.listdir("/proc/self/fd")
    read_ahead.prefetch_modules(["pipe", "missing", "lib-dynload/missing", "bootseer/missing"])
    assert os.listdir("/proc/self/fd") == before
