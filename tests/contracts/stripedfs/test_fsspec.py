"""The fsspec file system: fsspec's own conformance suite, and programs that read through it."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests import abstract

from bootseer.errors import AccessDeniedError, CorruptDataError, NotSupportedError, UsageError
from bootseer.storage.local import LocalStore
from bootseer.storage.store import Store
from bootseer.stripedfs.fsspec_face import chained_urls
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import CHUNK, SMALL, content, put_bytes, store_of

SIZE = 5 * CHUNK + 9


class Fixtures(abstract.AbstractFixtures):
    """What fsspec's suite asks of a file system under test."""

    @pytest.fixture
    def fs(self) -> StripedFileSystem:
        return StripedFileSystem(writing=SMALL)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"{tmp_path}/target-store"

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:  # theirs is a class method with a class's scope
        return LocalFileSystem(auto_mkdir=True)


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path / "store")


@pytest.fixture
def root(store: Store, tmp_path: Path) -> str:
    return f"{tmp_path}/store"


@pytest.fixture
def fs() -> StripedFileSystem:
    return StripedFileSystem(writing=SMALL)


def test_a_chained_url_finds_us_by_entry_point(store: Store, root: str, tmp_path: Path) -> None:
    put_bytes(store, "ckpt", content(SIZE), tmp_path)
    code = (
        "import fsspec, sys\n"
        "assert not [name for name in sys.modules if name.startswith('bootseer.')]\n"
        f"with fsspec.open('striped::file://{root}/ckpt') as file:\n"
        "    print(type(file).__name__, len(file.read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"StripedFile {SIZE}\n"


def test_what_is_large_is_striped_and_what_is_small_is_not(
    fs: StripedFileSystem, root: str
) -> None:
    fs.pipe({f"{root}/large": content(SIZE), f"{root}/small": b"small"})
    assert sorted(os.listdir(root)) == ["large.stripes", "small"]
    assert [fs.info(f"{root}/{n}")["striped"] for n in ("large", "small")] == [True, False]
    assert fs.cat([f"{root}/large", f"{root}/small"]) == {
        f"{root}/large": content(SIZE),
        f"{root}/small": b"small",
    }
    # Each takes the other's place whole.
    fs.pipe({f"{root}/large": b"now small", f"{root}/small": content(SIZE)})
    assert fs.cat_file(f"{root}/large") == b"now small"
    assert fs.cat_file(f"{root}/small") == content(SIZE)
    assert sorted(os.listdir(root)) == ["large", "small.stripes"]


def test_nothing_appears_of_a_file_that_failed(fs: StripedFileSystem, root: str) -> None:
    fs.pipe_file(f"{root}/x", b"old")
    for data in (b"new", content(SIZE)):
        with contextlib.suppress(RuntimeError), fs.open(f"{root}/x", "wb") as file:
            file.write(data)
            raise RuntimeError("in the middle")
    assert fs.cat_file(f"{root}/x") == b"old"
    assert fs.find(root) == [f"{root}/x"]


def test_a_transaction_publishes_at_its_end(fs: StripedFileSystem, root: str) -> None:
    with fs.transaction:
        with fs.open(f"{root}/x", "wb") as file:
            file.write(content(SIZE))
        assert not fs.exists(f"{root}/x")
    assert fs.cat_file(f"{root}/x") == content(SIZE)


def test_what_tells_no_size_is_copied_in_large_pieces(fs: StripedFileSystem, root: str) -> None:
    """As pipes, and the files of /proc, whose size is 0."""
    counts: list[int] = []
    callback = Callback(hooks={"count": lambda size, value, **rest: counts.append(value)})
    text = Path("/proc/version").read_bytes()
    fs.put_file("/proc/version", f"{root}/version", callback=callback)
    assert fs.cat_file(f"{root}/version") == text
    assert counts == [0, len(text)]


def test_names_move_with_their_bytes(fs: StripedFileSystem, root: str) -> None:
    fs.pipe({f"{root}/a": content(SIZE), f"{root}/b": content(SIZE, 1), f"{root}/s": b"small"})
    fs.mv(f"{root}/a", f"{root}/b")
    assert fs.cat_file(f"{root}/b") == content(SIZE)
    fs.mv(f"{root}/s", f"{root}/b")
    assert fs.cat_file(f"{root}/b") == b"small"
    fs.mkdir(f"{root}/folder")
    fs.pipe_file(f"{root}/a", content(SIZE, 2))
    fs.mv(f"{root}/a", f"{root}/folder")
    assert fs.cat_file(f"{root}/folder/a") == content(SIZE, 2)
    fs.mv(f"{root}/folder", f"{root}/other", recursive=True)
    assert fs.find(root) == [f"{root}/b", f"{root}/other/a"]


def test_a_directory_checkpoint_is_a_folder_that_stays_as_it_is(
    fs: StripedFileSystem, store: Store, root: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x").write_bytes(content(SIZE))
    (folder / "round").symlink_to("deep")
    put_into(store, "ckpt", str(folder), settings=SMALL)
    fs.pipe({f"{root}/large": b"other" * SIZE, f"{root}/small": b"s", f"{root}/folder/y": b"y"})
    before = sorted(Path(root).rglob("*"))
    assert fs.find(f"{root}/ckpt") == [f"{root}/ckpt/deep/x", f"{root}/ckpt/round"]
    assert fs.isdir(f"{root}/ckpt/deep")
    assert fs.cat_file(f"{root}/ckpt/round/x") == content(SIZE)
    for change in (
        lambda: fs.rm_file(f"{root}/ckpt/deep/x"),
        lambda: fs.pipe_file(f"{root}/ckpt/deep/x", b"other"),
        lambda: fs.mkdir(f"{root}/ckpt/new"),
        lambda: fs.mv(f"{root}/ckpt/deep/x", f"{root}/x"),
        lambda: fs.mv(f"{root}/small", f"{root}/ckpt"),
        lambda: fs.mv(f"{root}/large", f"{root}/ckpt/deep"),
        lambda: fs.mv(f"{root}/large", f"{root}/ckpt/deep/x"),
        lambda: fs.mv(f"{root}/folder", f"{root}/ckpt/new", recursive=True),
    ):
        with pytest.raises(PermissionError) as caught:
            change()
        assert isinstance(caught.value.__cause__, AccessDeniedError)
    assert fs.cat_file(f"{root}/ckpt/deep/x") == content(SIZE)
    assert sorted(Path(root).rglob("*")) == before
    fs.rm(f"{root}/ckpt", recursive=True)
    assert fs.find(root) == [f"{root}/folder/y", f"{root}/large", f"{root}/small"]


def test_ranges_of_several_files_and_an_error_at_its_place(
    fs: StripedFileSystem, store: Store, root: str, tmp_path: Path
) -> None:
    for name in ("a", "bad"):
        put_bytes(store, name, content(SIZE), tmp_path)
    stripe = next(Path(root, "bad.stripes").glob("v-*")) / "stripe-00001"
    stripe.write_bytes(bytes(stripe.stat().st_size))
    paths = [f"{root}/{n}" for n in ("a", "a", "none", "bad", "bad", "a")]
    starts = [0, -10, 0, 0, CHUNK, None]
    ends = [5, None, 1, 10, CHUNK + 1, 3]
    found = fs.cat_ranges(paths, starts, ends)
    whole = content(SIZE)
    assert [found[0], found[1], found[3], found[5]] == [
        whole[:5],
        whole[-10:],
        whole[:10],
        whole[:3],
    ]
    assert isinstance(found[2], FileNotFoundError)
    assert isinstance(found[4], CorruptDataError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, starts, ends, on_error="raise")


def test_python_has_its_own_exceptions(fs: StripedFileSystem, root: str) -> None:
    fs.mkdir(f"{root}/folder")
    fs.pipe_file(f"{root}/x", b"x")
    with pytest.raises(FileNotFoundError):
        fs.open(f"{root}/none")
    with pytest.raises(IsADirectoryError):
        fs.open(f"{root}/folder")
    with pytest.raises(IsADirectoryError):
        fs.open(f"{root}/folder", "wb")
    with pytest.raises(FileExistsError):
        fs.open(f"{root}/x", "xb")
    with pytest.raises(FileExistsError):
        fs.mkdir(f"{root}/folder")
    with pytest.raises(NotSupportedError, match="written once"):
        fs.open(f"{root}/x", "ab")
    with pytest.raises(ValueError, match="written once"):
        fs.open(f"{root}/x", "r+b")
    with fs.open(f"{root}/x", "wb") as file, pytest.raises(TypeError, match="being written"):
        pickle.dumps(file)
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
    fs.pipe_file(f"{root}/folder/y", b"y")
    fs.pipe({f"{root}/other/z": b"z", f"{root}/folder/other/z": b"z"})
    with pytest.raises(FileExistsError):
        fs.mv(f"{root}/other", f"{root}/folder", recursive=True)
    fs.rm(f"{root}/folder/other", recursive=True)
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir(f"{root}/folder")
    fs.rm_file(f"{root}/folder/y")
    Path(root, "folder/killed.stripes/.tmp-1").mkdir(parents=True)  # which no listing shows
    with pytest.raises(OSError, match=r"not empty: .*killed\.stripes") as caught:
        fs.rmdir(f"{root}/folder")
    assert caught.value.errno == errno.ENOTEMPTY


@pytest.mark.parametrize("size", [9, SIZE])
def test_nothing_is_written_below_a_file_or_under_names_of_ours(
    fs: StripedFileSystem, root: str, size: int
) -> None:
    fs.pipe({f"{root}/big": content(SIZE), f"{root}/small": b"small", f"{root}/folder/y": b"y"})
    before = sorted(Path(root).rglob("*"))
    data = content(size, 1)
    for file in ("big", "small", "folder/y"):
        for below in (f"{root}/{file}/x", f"{root}/{file}/deep/x"):
            for change in (
                lambda to=below: fs.pipe_file(to, data),
                lambda to=below: fs.open(to, "wb"),
                lambda to=below: fs.makedirs(to, exist_ok=True),
                lambda to=below: fs.mkdir(to),
                lambda to=below: fs.mv(f"{root}/folder/y", to),
                lambda to=below: fs.mv(f"{root}/big", to),
            ):
                with pytest.raises(NotADirectoryError):
                    change()
        with pytest.raises(FileExistsError):
            fs.makedirs(f"{root}/{file}", exist_ok=True)
    for name in ("a.stripes", ".tmp-x", ".nfs0", "big.stripes", "a.stripes/x", ".tmp-x/y"):
        for change in (
            lambda to=name: fs.pipe_file(f"{root}/{to}", data),
            lambda to=name: fs.open(f"{root}/{to}", "wb"),
            lambda to=name: fs.makedirs(f"{root}/{to}", exist_ok=True),
            lambda to=name: fs.mv(f"{root}/big", f"{root}/{to}"),
        ):
            with pytest.raises(OSError, match="a name of stripes or of unfinished") as caught:
                change()
            assert caught.value.errno == errno.EINVAL, name
    assert sorted(Path(root).rglob("*")) == before
    fs.pipe_file(f"{root}/big", data)  # and later writes are as they were
    assert fs.cat_file(f"{root}/big") == data


@pytest.mark.parametrize("size", [9, SIZE])
def test_what_is_published_is_no_error(
    fs: StripedFileSystem, root: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT: what the new bytes replace cannot be removed from the store."""
    refused = []

    def refuse(self: LocalStore, name: str) -> None:
        refused.append(name)
        raise AccessDeniedError(f"{name} stays")

    fs.pipe_file(f"{root}/x", content(SIZE))
    with fs.open(f"{root}/x", "wb") as file:
        file.write(content(size, 1))
        if size == SIZE:
            Path(root, "x/of another").mkdir(parents=True)  # the store itself refuses this one
        else:
            monkeypatch.setattr(LocalStore, "delete_tree", refuse)
    assert len(refused) == (size != SIZE)
    assert fs.cat_file(f"{root}/x") == content(size, 1)


@pytest.mark.parametrize("size", [9, SIZE])
def test_a_files_description_changes_with_its_bytes(
    fs: StripedFileSystem, store: Store, root: str, tmp_path: Path, size: int
) -> None:
    """`datasets` keeps what it made of a file by the first of ETag, etag and mtime."""
    tags, path = set(), f"{root}/x"
    for seed in range(5):  # within one second, and of one length
        fs.pipe_file(path, content(size, seed))
        tags.add(fs.info(path)["ETag"])
        assert fs.info(path)["ETag"] == fs.ls(root)[0]["ETag"] == fs.info(path)["ETag"]
    assert len(tags) == 5
    (tmp_path / "run").mkdir()
    found = []
    for seed in (0, 1):
        (tmp_path / "run/a").write_bytes(content(size, seed))
        (tmp_path / "run/b").write_bytes(b"the same")
        put_into(store, "run", str(tmp_path / "run"), settings=SMALL)
        found.append({each["name"][-1]: each["ETag"] for each in fs.ls(f"{root}/run")})
    assert found[0]["a"] != found[1]["a"]
    assert found[0]["b"] == found[1]["b"]


@pytest.mark.parametrize("size", [9, SIZE])
def test_keys_of_caches_change_with_a_file_and_with_nothing_else(
    fs: StripedFileSystem, root: str, size: int
) -> None:
    """dask keys what it made of a file by `ukey` (dask, bytes/core.py) or `checksum`, and fsspec's
    caches with `check_files` look for another `ukey`."""
    seen, path = set(), f"{root}/x"
    fs.pipe_file(f"{root}/beside", content(size))
    for seed in range(3):  # within one second, and of one length
        fs.pipe_file(path, content(size, seed))
        assert fs.info(path)["striped"] is (size == SIZE)
        keys = {key for _ in range(2) for key in keys_of(f"striped::{path}")}
        fs.pipe_file(f"{root}/beside", content(size, seed))
        fs.cat_file(path)
        assert keys == {fs.ukey(path)} == {fs.checksum(path)}
        seen |= keys
    assert len(seen) == 3
    assert fs.ukey(f"{root}/beside") not in seen


def keys_of(url: str) -> tuple[str, str]:
    """Both keys, by a file system of their own, as another process would have it."""
    files, path = fsspec.core.url_to_fs(url)
    return files.ukey(path), files.checksum(path)


@pytest.mark.parametrize(
    "url", ["striped::{}", "striped::file://{}", "striped://{}", "striped://{}::{}"]
)
def test_a_url_with_an_absolute_path_stays_one(
    fs: StripedFileSystem, root: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through each call that `datasets` makes to find a file, to keep it by its tag, and to read
    it (datasets 5.2, `data_files.py` and `utils/file_utils.py`): it globs, puts the protocol
    before what it found, and its own paths make two slashes of three."""
    monkeypatch.chdir(tmp_path)
    path, given = f"{root}/x", url.format(f"{root}/x", f"{root}/x")
    seen = []
    for seed in range(2):
        fs.pipe_file(path, content(SIZE, seed))
        files, found = fsspec.core.url_to_fs(given)
        assert isinstance(files, StripedFileSystem)
        assert (found, list(files.glob(found))) == (path, [path])
        for again in (f"striped://{path}", files.unstrip_protocol(path)):
            for one in (again, again.replace(":///", "://"), f"{again}::{path}"):
                files, token, (found,) = fsspec.get_fs_token_paths(one)
                assert (token != "", found) == (True, path)
                with files.open(found) as file:
                    assert file.read() == content(SIZE, seed)
        files, found = fsspec.core.url_to_fs(given)
        seen.append(files.info(found)["ETag"])
        files.get_file(found, str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == content(SIZE, seed)
    assert seen[0] != seen[1]


def test_text_compression_and_pickles(fs: StripedFileSystem, root: str) -> None:
    with fs.open(f"{root}/t.gz", "wt", compression="gzip") as file:
        file.write("one\ntwo\n")
    with fs.open(f"{root}/t.gz", "rt", compression="gzip") as file:
        assert list(file) == ["one\n", "two\n"]
    again = pickle.loads(pickle.dumps(fs))
    with again.open(f"{root}/t.gz") as file:
        assert pickle.loads(pickle.dumps(file)).read()[:2] == b"\x1f\x8b"


def test_former_names_work_in_programs_and_pickles(fs: StripedFileSystem, root: str) -> None:
    from bootseer.stripedfs.fs import UnsupportedModeError

    with pytest.raises(UnsupportedModeError):
        fs.open(f"{root}/x", "r+b")
    fs.pipe_file(f"{root}/x", content(SIZE))
    with fs.open(f"{root}/x") as file:
        packed = pickle.dumps(file, protocol=2)  # in which names are plain lines
    for name, former in (
        (b"fsspec_face.filesystem\n", b"fs\n"),
        (b"\n_unpickle\n", b"\n_unpickled\n"),
    ):
        assert name in packed
        packed = packed.replace(name, former)
    with pickle.loads(packed) as file:
        assert file.read() == content(SIZE)


# fsspec does not close the file that it maps.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cache", ["blockcache", "cached", "filecache", "simplecache"])
def test_caches_of_fsspec_read_through_us(
    fs: StripedFileSystem, root: str, tmp_path: Path, cache: str
) -> None:
    fs.pipe_file(f"{root}/x", content(SIZE))
    blocks = {"block_size": CHUNK} if cache in ("blockcache", "cached") else {}
    for _ in range(2):  # the second time what was read lies in the cache
        files = fsspec.filesystem(
            cache, cache_storage=f"{tmp_path}/cache", target_protocol="striped"
        )
        with files.open(f"{root}/x", **blocks) as file:
            file.seek(CHUNK + 5)
            assert file.read(100) == content(SIZE)[CHUNK + 5 :][:100]
            file.seek(-9, os.SEEK_END)
            assert file.read() == content(SIZE)[-9:]
    if blocks:
        fs.pipe_file(f"{root}/x", content(SIZE + 1))
        with pytest.raises(CorruptDataError, match="when it was cached"):
            files.open(f"{root}/x", **blocks)
    else:
        assert len(os.listdir(tmp_path / "cache")) in (1, 2)  # with what filecache notes


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("striped::file:///a/b/", "/a/b"),
        ("striped:///a/b", "/a/b"),
        ("striped://a/b", "/a/b"),
        ("striped://https://host/dir/x", "https://host/dir/x"),
        ("/a", "/a"),
        ("striped::webhdfs://nn:9870/dir/x", "/dir/x"),
        ("striped::hdfs://nameservice/", "/"),
        ("striped::https://host/dir/x", "https://host/dir/x"),
    ],
)
def test_paths_are_taken_from_chained_urls(given: str, path: str) -> None:
    assert StripedFileSystem._strip_protocol(given) == path


def test_the_store_is_taken_from_the_chain() -> None:
    options = {"host": "nn", "port": 9870}
    assert chained_urls.base_url("webhdfs", options) == "webhdfs://nn:9870/"
    assert chained_urls.base_url("webhdfs", {**options, "use_https": True}) == "webhdfss://nn:9870/"
    assert chained_urls.base_url("hdfs", {"host": "nameservice"}) == "hdfs://nameservice/"
    assert chained_urls.base_url("file", {}) == "file:///"
    with pytest.raises(UsageError, match="host"):
        chained_urls.base_url("hdfs", {})
    with pytest.raises(NotSupportedError, match="s3"):
        chained_urls.base_url("s3", {})


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(fsspec.registry)
    yield
    for protocol in ("hdfs", "webhdfs", "webHDFS"):
        sys.modules["fsspec.registry"]._registry.pop(protocol, None)
        if protocol in before:
            fsspec.register_implementation(protocol, before[protocol])


def test_fsspec_keeps_its_own_until_it_is_told(registry: None) -> None:
    from bootseer.stripedfs.fsspec_face.register import register

    assert fsspec.get_filesystem_class("webhdfs").__module__ == "fsspec.implementations.webhdfs"
    register(hdfs=False)
    fs, path = fsspec.core.url_to_fs("webhdfs://user@nn:9870/dir/x")
    assert isinstance(fs, StripedFileSystem)
    assert (fs._base, fs._options.user, path) == ("webhdfs://nn:9870/", "user", "/dir/x")
    assert not issubclass(fsspec.get_filesystem_class("hdfs"), StripedFileSystem)


# --- programs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_pandas_and_pyarrow_read_and_write(root: str) -> None:
    import pandas
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet

    frame = pandas.DataFrame({"n": range(5000), "text": [f"row {n}" for n in range(5000)]})
    url = f"striped::file://{root}/table"
    options = {"striped": {"writing": SMALL}}
    frame.to_csv(f"{url}.csv", index=False, storage_options=options)
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{url}.csv"), frame)
    frame.to_parquet(f"{url}.parquet", storage_options=options)
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{url}.parquet"), frame)
    assert os.path.isdir(f"{root}/table.parquet.stripes")
    fs = StripedFileSystem()
    arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))
    dataset = pyarrow.dataset.dataset(f"{root}/table.parquet", filesystem=arrow)
    assert dataset.to_table().num_rows == 5000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_saves_and_loads_a_distributed_checkpoint(root: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state: dict[str, Any] = {
        "weights": torch.arange(100_000, dtype=torch.float32),
        "bias": torch.ones(33),
    }
    url = f"striped::file://{root}/step-10"
    dcp.save(state, storage_writer=FsspecWriter(url, writing=SMALL), no_dist=True)
    assert any(name.endswith(".stripes") for name in os.listdir(f"{root}/step-10"))
    loaded = {"weights": torch.zeros(100_000), "bias": torch.zeros(33)}
    dcp.load(loaded, checkpoint_id=url, no_dist=True)  # as documented: nothing of ours is named
    assert all(torch.equal(loaded[name], state[name]) for name in state)
