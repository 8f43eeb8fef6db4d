"""Block images against what podman itself unpacks, entry by entry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from tests.support.samples.images import (
    Image,
    Layer,
    device,
    directory,
    fifo,
    file,
    hardlink,
    opaque,
    symlink,
    whiteout,
    write_layout,
)
from tests.support.trees.block_images import built_tree, differences, facts

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]
CAPABILITY = b"\x01\x00\x00\x02\x00\x20\x00\x00" + bytes(12)
# What podman itself makes the root of every image, whatever the layers say of it.
ROOT = frozenset({(b"", "mode"), (b"", "mtime_ns"), (b"", "owner")})


def compare(
    registry: Any,
    podman: Any,
    folder: Path,
    name: str,
    image: Image,
    besides: frozenset[tuple[bytes, str]] = frozenset(),
) -> None:
    """Build ours, let podman unpack its own, and find no difference.

    Directories that no layer lists get the moment of unpacking from podman, and 0 from us.
    """
    made = write_layout(folder / "layout", image, tag="1")
    ref = registry.push(made.source, f"build/{name}", "1")
    with built_tree(ref, folder / "ours") as tree:
        podman.pull(ref)
        with podman.mounted(ref) as theirs:
            implied = {(p, "mtime_ns") for p, f in facts(tree.root).items() if not f["mtime_ns"]}
            assert differences(tree.root, theirs, besides=ROOT | besides | implied) == []


def test_every_kind_of_entry(registry: Any, podman: Any, tmp_path: Path) -> None:
    members = [
        directory("bin", mode=0o1777, uid=3, gid=4, mtime_s=1_600_000_000.123456789),
        file("bin/su", b"su" * 3000, mode=0o6755, uid=1000, gid=2_000_000),
        file("bin/ping", b"ping", mode=0o755, xattrs={"security.capability": CAPABILITY}),
        file("bin/user", b"", mode=0, xattrs={"user.note": b"\xff\x00x", "trusted.t": b""}),
        hardlink("bin/su2", "bin/su"),
        file("bin/cap", b"cap", xattrs={"security.capability": CAPABILITY, "user.kept": b"1"}),
        hardlink("bin/cap2", "bin/cap"),
        file("bin/cap3", b"cap", uid=9, xattrs={"security.capability": CAPABILITY}),
        hardlink("bin/cap4", "bin/cap3"),
        hardlink("other", "./bin/su"),
        symlink("bin/sh", "/usr/bin/../dash", uid=7, mtime_s=1_500_000_000.5),
        hardlink("bin/sh2", "bin/sh"),
        symlink("up", "../../../etc/passwd"),
        symlink("long", "x" * 4000),
        device("dev/console", "char", 5, 1, mode=0o620),
        device("dev/disk", "block", 259, 300_000),
        fifo("dev/pipe"),
        file("dot/./a//b", b"normal"),
        file("naïve-\N{SNOWMAN}", b"utf-8"),
        file(b"latin-\xe9\xff", b"not utf-8"),
        file("old", b"before 1970", mtime_s=-86400.25),
        file("far", b"after 2106", mtime_s=5_000_000_000),
        file("deep/" * 40 + "x" * 200, b"long name"),
        file("zeros", bytes(3 << 20)),
        file("mixed", b"a" * 300_000 + bytes(2 << 20) + b"b"),
    ]
    members += [file(f"many/entry-with-a-long-enough-name-{n:05}", b"%d" % n) for n in range(2000)]
    # Podman turns times before 1970 into 1970; an image keeps them.
    compare(
        registry, podman, tmp_path, "kinds", Image([members]), frozenset({(b"old", "mtime_ns")})
    )


def test_layers_that_hide_one_another(registry: Any, podman: Any, tmp_path: Path) -> None:
    lower = [
        directory("keep", uid=5, mode=0o700),
        file("keep/a", b"1"),
        file("keep/b", b"1"),
        directory("opaque"),
        file("opaque/old", b"1"),
        directory("opaque/sub"),
        file("opaque/sub/old", b"1"),
        directory("dir-to-file"),
        file("dir-to-file/x", b"1"),
        file("file-to-dir", b"1"),
        symlink("link-to-dir", "keep"),
        directory("gone"),
        file("gone/x", b"1"),
        file("linked", b"shared" * 100),
        hardlink("linked2", "linked"),
        file("reborn", b"first"),
    ]
    middle = [
        directory("keep", uid=6, mode=0o750),
        whiteout("keep/a"),
        directory("opaque"),
        opaque("opaque"),
        file("opaque/new", b"2"),
        whiteout("gone"),
        whiteout("dir-to-file"),
        file("dir-to-file", b"2"),
        whiteout("file-to-dir"),
        directory("file-to-dir"),
        file("file-to-dir/x", b"2"),
        whiteout("reborn"),
        file("linked", b"changed"),
    ]
    upper = [
        directory("gone", mode=0o711),
        file("gone/y", b"3"),
        file("reborn", b"third"),
        directory("link-to-dir"),
        file("link-to-dir/x", b"3"),
        directory("opaque"),
        directory("opaque/sub"),
        file("opaque/sub/new", b"3"),
        whiteout("never-was-there"),
    ]
    layers = [Layer(lower, compression="gzip"), Layer(middle, compression="zstd"), Layer(upper)]
    compare(registry, podman, tmp_path, "layers", Image(layers))


def test_a_hard_link_whose_first_name_is_hidden(registry: Any, podman: Any, tmp_path: Path) -> None:
    lower = [
        file("a", b"content of the lower layer" * 50_000),
        hardlink("b", "a"),
        hardlink("c", "b"),
    ]
    compare(registry, podman, tmp_path, "hidden", Image([lower, [whiteout("a"), file("b", b"n")]]))


def test_links_within_a_layer_are_followed(registry: Any, podman: Any, tmp_path: Path) -> None:
    members = [
        directory("usr"),
        directory("usr/lib"),
        symlink("lib", "usr/lib"),
        symlink("abs", "/usr"),
        file("lib/x", b"through a link"),
        file("abs/lib/y", b"through an absolute one"),
        hardlink("z", "lib/x"),
    ]
    compare(registry, podman, tmp_path, "links", Image([members]))


def test_what_podman_itself_commits(registry: Any, podman: Any, tmp_path: Path) -> None:
    """Debian's own files, and layers as podman makes them of what a container did."""
    host = [
        "etc",
        "usr/bin/su",
        "usr/bin/passwd",
        "usr/sbin/unix_chkpwd",
        "usr/share/perl5",
        "usr/lib/python3.11/json",
    ]
    raw = tmp_path / "debian.tar"
    words = ["tar", "-C", "/", "--xattrs", "--format=posix", "--sparse", "-cf", str(raw)]
    present = [name for name in host if Path("/", name).exists()]
    subprocess.run([*words, "--exclude=etc/mtab", *present], check=True, capture_output=True)
    busybox = Path("/bin/busybox")
    tools = [
        directory("bin"),
        file("bin/busybox", busybox, mode=0o755),
        symlink("bin/sh", "busybox"),
    ]
    image = Image([Layer(raw_tar=raw), tools], config={"Env": ["PATH=/bin"]})
    made = write_layout(tmp_path / "layout", image, tag="1")
    ref = registry.push(made.source, "build/debian", "1")
    podman.pull(ref)
    script = """
        set -e; busybox --install -s /bin
        cd /etc; rm -r cron.d; mv default default-moved; mkdir cron.d; echo new > cron.d/job
        rm passwd; echo root:x:0:0::/: > passwd; ln passwd passwd-link; chmod 4711 hostname
        mkdir -p /a/b/c; ln -s /a/b /link; mknod /a/null c 1 3; mkfifo /a/pipe
        rm -rf init.d; ln -s default-moved init.d; touch -d 2001-02-03 /a/b
        dd if=/dev/zero of=/a/holes bs=1 count=1 seek=20000000; chown 1234:5678 group
    """
    name = f"{registry.host}/build/committed:1"
    podman("run", "--name", "work", "--network", "none", ref, "sh", "-c", script)
    try:
        podman("commit", "--quiet", "work", name)
    finally:
        podman("rm", "--force", "work")
    podman("push", "--quiet", "--tls-verify=false", name)
    with built_tree(name, tmp_path / "ours") as tree, podman.mounted(name) as theirs:
        assert (tree.root / "etc/cron.d").is_dir()
        assert os.listdir(tree.root / "etc/cron.d") == ["job"]
        implied = {(p, "mtime_ns") for p, f in facts(tree.root).items() if not f["mtime_ns"]}
        assert differences(tree.root, theirs, besides=ROOT | implied) == []


def compare_real(registry: Any, podman: Any, folder: Path, name: str) -> int:
    """A real image as `image mount` shows it, against podman's; returns how many entries."""
    from tools.images import real

    ref = registry.push(real.image(name).source, f"real/{name}", "1")
    build_image(BuildSettings(ref=ref, cache_dir=str(folder / "build")))
    podman.pull(ref)
    place = folder / "mounted"
    place.mkdir()
    runtime = ["--runtime", str(folder / "runtime")]
    bootseer = [sys.executable, "-m", "bootseer", "image"]
    words = ["mount", *runtime, "--cache", str(folder / "cache"), "--no-record", ref, str(place)]
    subprocess.run([*bootseer, *words], check=True, stdout=subprocess.DEVNULL)
    try:
        with podman.mounted(ref) as theirs:
            entries = sum(len(folders) + len(files) for _, folders, files in os.walk(theirs))
            implied = {(p, "mtime_ns") for p, f in facts(place).items() if not f["mtime_ns"]}
            assert len(implied) < 20  # folders that no layer lists
            assert differences(place, theirs, besides=ROOT | implied) == []
    finally:
        subprocess.run([*bootseer, "umount", *runtime, str(place)], check=True)
    return entries


def test_a_real_image(registry: Any, podman: Any, tmp_path: Path) -> None:
    assert compare_real(registry, podman, tmp_path, "debian") > 5_000


@pytest.mark.soak
@pytest.mark.parametrize("name", ["python", "torch"])
def test_large_real_images(registry: Any, podman: Any, tmp_path: Path, name: str) -> None:
    assert compare_real(registry, podman, tmp_path, name) > 9_000


@pytest.mark.parametrize("words", ["--format=gnu", "--format=posix"])
def test_five_gigabytes_of_holes_in_a_layer(tmp_path: Path, words: str) -> None:
    places = {0: b"first", (9 << 29) + 5: b"beyond 32 bits", (5 << 30) - 4: b"last"}
    (tmp_path / "from").mkdir()
    with (tmp_path / "from/large").open("wb") as out:
        for offset, data in places.items():
            out.seek(offset)
            out.write(data)
    raw = tmp_path / "sparse.tar"
    command = ["tar", "-C", str(tmp_path / "from"), words, "--sparse", "-cf", str(raw), "large"]
    subprocess.run(command, check=True)
    write_layout(tmp_path / "layout", Image([Layer(raw_tar=raw)]), tag="1")
    with built_tree(f"oci-layout:{tmp_path}/layout:1", tmp_path / "ours") as tree:
        assert (tree.root / "large").stat().st_size == 5 << 30
        with (tree.root / "large").open("rb") as source:
            for offset, data in places.items():
                source.seek(offset)
                assert source.read(len(data)) == data
            source.seek(1 << 32)
            assert not any(source.read(1 << 20))
        assert tree.report.data_bytes <= 8 << 20
