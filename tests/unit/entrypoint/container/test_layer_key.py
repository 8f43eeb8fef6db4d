"""What a dependency layer depends on, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bootseer.config.sections import DepsSettings
from bootseer.entrypoint.container.container_files import ContainerFiles
from bootseer.entrypoint.container.layer_key import LayerKey, make_key
from bootseer.errors import NotFoundError, UsageError

IMAGE = "sha256:" + "1" * 64
INSTALL = ("pip", "install", "-r", "requirements.txt")


class Container:
    """A container's files, its variables and its settings."""

    def __init__(self, folder: Path) -> None:
        self.job, self.tree = folder / "job", folder / "tree"
        for path in (self.job, self.tree):
            path.mkdir()
        self.write("requirements.txt", "numpy==2.0\n")
        options = ["--volume", f"{self.job}:/job:ro", "--workdir", "/job"]
        self.files = ContainerFiles.of(str(self.tree), options, "/")

    def write(self, name: str, text: str) -> None:
        (self.job / name).write_text(text)

    def key(
        self,
        *install: str,
        environ: Mapping[str, str] | None = None,
        image: str = IMAGE,
        user: str = "",
        **deps: tuple[str, ...],
    ) -> LayerKey:
        settings = DepsSettings(install=install or INSTALL, **deps)  # type: ignore[arg-type]
        return make_key(settings, image, self.files, environ or {}, user)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_the_same_inputs_have_the_same_key(container: Container) -> None:
    key = container.key()
    assert container.key() == key
    assert len(key.digest) == 64
    assert key.tag == f"bootseer-deps-{key.digest[:40]}"


def test_each_input_counts(container: Container) -> None:
    keys = [
        container.key(),
        container.key(image="sha256:" + "2" * 64),
        container.key(user="1000"),
        container.key("pip", "install", "-q", "-r", "requirements.txt"),
        container.key(environ={"PIP_INDEX_URL": "https://index.example/simple"}),
        container.key(environ={"MINE": "1"}, key_env=("MINE",)),
        container.key(exclude=("*.pyc",)),
    ]
    container.write("requirements.txt", "numpy==2.1\n")
    keys.append(container.key())
    assert len({key.digest for key in keys}) == len(keys)


def test_what_decides_nothing_does_not_count(container: Container) -> None:
    key = container.key()
    assert container.key(environ={"LANG": "C", "PIP_CACHE_DIR": "/x", "MINE": "2"}) == key
    container.write("other.txt", "x")
    assert container.key() == key


def test_lists_that_others_include_count(container: Container) -> None:
    container.write("requirements.txt", "-r more.txt\n-c limits.txt\n")
    container.write("more.txt", "six==1\n")
    container.write("limits.txt", "six==1\n")
    key = container.key()
    for name in ("more.txt", "limits.txt"):
        container.write(name, "six==2\n")
        after = container.key()
        assert after != key
        key = after


@pytest.mark.parametrize(
    ("text", "is_pinned"),
    [
        ("numpy==2.0\npandas[a]==1 ; python_version > '3'\n# a note\n", True),
        ("numpy==2.0\npandas\n", False),
        ("numpy>=2\n", False),
        ("--index-url https://x/simple\nnumpy==2.0\n", True),
    ],
)
def test_only_exact_versions_are_a_lock(container: Container, text: str, is_pinned: bool) -> None:
    container.write("requirements.txt", text)
    assert bool(container.key().pins) is is_pinned


def test_requirements_in_the_command(container: Container) -> None:
    assert container.key("pip", "install", "numpy==2.0").pins == {"numpy": "2.0"}
    assert container.key("pip", "install", "numpy").pins == {}
    assert container.key("apt-get", "install", "x", key_files=("requirements.txt",)).pins == {}


@pytest.mark.parametrize(
    "install",
    [
        ("apt-get", "install", "libx"),
        ("pip", "install", "-e", "."),
        ("pip", "install", "./wheels/x.whl"),
        ("sh", "-c", "pip install x; true"),
        ("pip", "install", "-r", "https://example.org/list.txt"),
        ("true",),
    ],
)
def test_commands_whose_inputs_are_not_known_are_refused(
    container: Container, install: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError):
        container.key(*install)


@pytest.mark.parametrize(
    "line",
    [
        "./wheels/x-1.whl",
        "-e .",
        "x-1.0-py3-none-any.whl",
        "x @ file:///job/x",
        "x[a] @ file:/job/x",
        "--find-links /job/wheels",
    ],
)
def test_lists_that_name_files_need_key_files(container: Container, line: str) -> None:
    container.write("requirements.txt", f"{line}\n")
    with pytest.raises(UsageError, match="key_files"):
        container.key()
    assert container.key(key_files=("requirements.txt",)).pins == {}


@pytest.mark.parametrize(
    "variables", [{"PIP_FIND_LINKS": "/job/wheels"}, {"UV_FIND_LINKS": "/job/wheels"}]
)
def test_variables_that_name_folders_of_packages_need_key_files(
    container: Container, variables: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match="key_files"):
        container.key(environ=variables)


def test_lists_that_variables_and_settings_name_count(container: Container) -> None:
    (container.tree / "etc").mkdir()
    settings = container.tree / "etc/pip.conf"
    variables = {"PIP_CONSTRAINT": "/job/limits.txt"}
    container.write("limits.txt", "six==1\n")
    keys = [container.key(), container.key(environ=variables)]
    container.write("limits.txt", "six==2\n")
    keys.append(container.key(environ=variables))
    settings.write_text("[global]\nindex-url = https://other.example/simple\n")
    keys.append(container.key())
    settings.write_text("[install]\nconstraint = /job/limits.txt\n")
    keys.append(container.key())
    container.write("limits.txt", "six==3\n")
    keys.append(container.key())
    assert len({key.digest for key in keys}) == len(keys)


def test_settings_of_the_containers_user_count(container: Container) -> None:
    (container.tree / "etc").mkdir()
    (container.tree / "etc/passwd").write_text("bob:x:1000:1000::/home/bob:/bin/sh\n")
    (container.tree / "home/bob/.config/pip").mkdir(parents=True)
    before = container.key(user="bob"), container.key()
    (container.tree / "home/bob/.config/pip/pip.conf").write_text("[global]\npre = true\n")
    after = container.key(user="bob"), container.key()
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_key_files_stand_for_what_is_not_known(container: Container) -> None:
    one = container.key("make", "install", key_files=("requirements.txt",))
    container.write("requirements.txt", "changed")
    assert container.key("make", "install", key_files=("requirements.txt",)) != one


def test_a_file_that_is_not_there_is_named(container: Container) -> None:
    with pytest.raises(NotFoundError, match=r"no lock.txt in the container \(from /job\)"):
        container.key(key_files=("lock.txt",))
    with pytest.raises(NotFoundError, match=r"no /job/gone\.txt"):
        container.key("pip", "install", "-r", "gone.txt")


def test_no_credential_is_in_a_key(container: Container) -> None:
    one, other = (f"https://me:{word}@index.example/simple" for word in ("one", "other"))
    assert container.key(environ={"PIP_INDEX_URL": one}) == container.key(
        environ={"PIP_INDEX_URL": other}
    )
    with pytest.raises(UsageError):
        container.key(environ={"MY_TOKEN": "x"}, key_env=("MY_TOKEN",))


def test_files_of_the_image_and_links_in_it(container: Container) -> None:
    (container.tree / "app").mkdir()
    (container.tree / "app" / "list.txt").write_text("six==1\n")
    (container.tree / "link.txt").symlink_to("/app/list.txt")
    files = replace(container.files, directory="/")
    assert files.read("/link.txt") == b"six==1\n"
    assert files.read("app/list.txt") == b"six==1\n"
    (container.tree / "out.txt").symlink_to("../../../../../../etc/hostname")
    assert files.read("/out.txt") is None


def test_links_into_volumes_and_out_of_them_are_not_followed(container: Container) -> None:
    files = container.files
    (container.job / "data").mkdir()
    container.write("data/list.txt", "six==1\n")
    (container.job / "inside.txt").symlink_to("data/list.txt")
    assert files.read("inside.txt") == b"six==1\n"
    (container.job / "outside.txt").symlink_to("/etc/hostname")
    (container.tree / "job").mkdir()
    (container.tree / "job/requirements.txt").write_text("of the image, below the volume\n")
    (container.tree / "link.txt").symlink_to("/job/requirements.txt")
    for path in ("outside.txt", "/link.txt"):
        with pytest.raises(UsageError, match="name it directly"):
            files.read(path)


def test_a_volume_at_a_link_is_elsewhere(tmp_path: Path) -> None:
    for folder in ("tree/opt/ws", "shown"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tree/workspace").symlink_to("/opt/ws")
    (tmp_path / "shown/list.txt").write_text("six==1\n")
    files = ContainerFiles.of(str(tmp_path / "tree"), ["-v", f"{tmp_path}/shown:/workspace"], "/")
    with pytest.raises(UsageError, match="name it directly"):
        files.read("/workspace/list.txt")
