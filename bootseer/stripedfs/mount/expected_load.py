"""Which files of a mount a job will load: a guess, made before the job says so.

| wanted | what it means |
|---|---|
| "" | the mounted file, directory checkpoint, or folder without folders in it |
| `NAME` | what has this name in the mount |
| `PATTERN` (`step-*`) | the newest whole checkpoint of the names that match |
| `@FILE` | what the first line of this file names |
| `@FILE:FORMAT` | the same, with the line put into FORMAT: `iter_{:07}` for Megatron's numbers |
| `!COMMAND` | what the first line names that a line of a shell prints, on this node |
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import CorruptDataError, DeadlineError, NotFoundError, from_os_error
from bootseer.fuse.operations import FileSystemError
from bootseer.stripedfs.format.manifest import TreeLink
from bootseer.stripedfs.read.namespace import DCP_METADATA, is_dcp_file
from bootseer.stripedfs.read.open import open_file

if TYPE_CHECKING:
    from bootseer.stripedfs.mount.inodes import Node
    from bootseer.stripedfs.mount.read_tree import StripedTree

MOST_POINTER_BYTES = 4096
COMMAND_S = 10.0
MOST_INDEX_BYTES = 32 << 20
MOST_FILES = 100_000
SMALL_BYTES = 1 << 20
"""Loaders read small files, such as indices, before the large ones that these describe."""
UNFINISHED = (".tmp", ".temp", ".incomplete", ".partial")
"""Ends of names that savers give to what they have not finished."""
INDEX_ENDING = ".index.json"  # of sharded safetensors and PyTorch checkpoints of Hugging Face


def find_expected(tree: StripedTree, wanted: str) -> list[Node]:
    """The files that a job is expected to load, in the order in which loaders read them.

    Empty where nothing can be expected. Raises NotFoundError for a name that is not there,
    CorruptDataError for a pointer file or a command that names nothing, and what the store raises.
    """
    root = tree.nodes.root
    if not wanted:
        return _order(_files_of_root(tree, root))
    node = _find(tree, wanted)
    return [] if node is None else _order(_files_below(tree, node))


def _files_of_root(tree: StripedTree, root: Node) -> list[Node]:
    if root.info.version is not None or not root.info.is_folder:
        return _files_below(tree, root)
    children = _children(tree, root)
    has_folders = any(child.info.is_folder for child in children)
    is_whole = not has_folders and _is_whole(tree, root)
    return [child for child in children if _is_file(child)] if is_whole else []


def _find(tree: StripedTree, wanted: str) -> Node | None:
    if wanted.startswith("@"):
        name, _, form = wanted[1:].partition(":")
        return _look_up(tree, _format_name(_read_pointer(tree, name), form))
    if wanted.startswith("!"):
        return _look_up(tree, _ask_command(wanted[1:]))
    if not any(mark in wanted for mark in "*?["):
        return _look_up(tree, wanted)
    folder, _, pattern = wanted.rpartition("/")
    parent = _look_up(tree, folder) if folder else tree.nodes.root
    matching = [
        child
        for child in _children(tree, parent)
        if fnmatch.fnmatchcase(os.fsdecode(child.name), pattern)
    ]
    newest_first = sorted(matching, key=_age, reverse=True)
    return next((child for child in newest_first if _is_whole(tree, child)), None)


def _look_up(tree: StripedTree, name: str) -> Node:
    node = tree.nodes.root
    for part in filter(None, name.split("/")):
        if part in (".", ".."):
            raise NotFoundError(f"{name} is no name below the mount")
        try:
            node = tree.child(node, os.fsencode(part))
        except FileSystemError as error:
            raise NotFoundError(f"there is no {name} in {tree.store.url}") from error
    return node


def _read_pointer(tree: StripedTree, name: str) -> str:
    data = _read(tree, _look_up(tree, name), MOST_POINTER_BYTES)
    return _parse_name(data, f"the first line of {name}")


def _ask_command(line: str) -> str:
    import subprocess  # most mounts do without

    try:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"the command that names the checkpoint took more than {COMMAND_S:g} s"
        ) from error
    except OSError as error:
        raise from_os_error(error, "run the command that names the checkpoint") from error
    if done.returncode:
        raise NotFoundError(
            f"the command that names the checkpoint ended with exit code {done.returncode}"
        )
    return _parse_name(done.stdout[:MOST_POINTER_BYTES], "what the command printed")


def _parse_name(data: bytes, what: str) -> str:
    line = data.split(b"\n", 1)[0].strip()
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise CorruptDataError(f"{what} names nothing")
    return text


def _format_name(text: str, form: str) -> str:
    """A pointer's line in a form with one `{}`; in `{:07}` a number gets leading zeros.

    A line that is no number is the name itself there, as Megatron's `release`.
    """
    is_number = re.search(r"\{:\d+d?\}", form) is not None
    if not form or (is_number and not text.isdecimal()):
        return text
    try:
        return form.format(int(text) if is_number else text)
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"{text!r} does not fit the form {form!r}: {error}") from error


def _read(tree: StripedTree, node: Node, most_bytes: int) -> bytes:
    if node.info.is_folder:
        raise NotFoundError(f"{node.path} is a folder, not a file that names one")
    # Not `tree.source`, which would keep it: a job that opens a pointer, which is replaced with
    # each save, would read the file that is here now, and fail once it has changed.
    source = open_file(tree.store, node.info)
    buffer = bytearray(min(source.size_bytes, most_bytes))
    tree.files.fetcher.read_into(source, 0, buffer)
    return bytes(buffer)


def _children(tree: StripedTree, node: Node) -> list[Node]:
    return tree.nodes.children(node, tree.listing(node))


def _files_below(tree: StripedTree, node: Node) -> list[Node]:
    if node is not tree.nodes.root and not node.info.is_folder:
        return [node] if _is_file(node) else []
    out: list[Node] = []
    waiting = [node]
    while waiting and len(out) < MOST_FILES:
        for child in _children(tree, waiting.pop()):
            if child.info.is_folder:
                waiting.append(child)
            elif _is_file(child):
                out.append(child)
    return out


def _is_file(node: Node) -> bool:
    info = node.info
    is_link = bool(info.link) or isinstance(info.entry, TreeLink)
    return info.problem is None and not is_link and info.size_bytes > 0


def _is_whole(tree: StripedTree, node: Node) -> bool:
    """Whether a saver has finished it, as far as its files show."""
    info = node.info
    if info.problem is not None or os.fsdecode(node.name).endswith(UNFINISHED):
        return False
    if info.version is not None or not info.is_folder:
        return True  # published at once; or a file, which shows nothing more
    children = {os.fsdecode(child.name): child for child in _children(tree, node)}
    if not children or any(name.endswith(UNFINISHED) for name in children):
        return False
    if any(is_dcp_file(name) for name in children) and DCP_METADATA not in children:
        return False
    indices = [child for name, child in children.items() if name.endswith(INDEX_ENDING)]
    return all(_names_of(tree, index) <= children.keys() for index in indices)


def _names_of(tree: StripedTree, index: Node) -> set[str]:
    """The files that an index names; none where it is not understood."""
    try:
        named = json.loads(_read(tree, index, MOST_INDEX_BYTES))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in named if isinstance(name, str)}


def _age(node: Node) -> tuple[float, Sequence[tuple[int, int, str]]]:
    """A sort key: by time, else by the numbers in its name."""
    return node.info.mtime_s, _natural(os.fsdecode(node.name))


def _natural(name: str) -> Sequence[tuple[int, int, str]]:
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.info.size_bytes > SMALL_BYTES, _natural(node.path)))
