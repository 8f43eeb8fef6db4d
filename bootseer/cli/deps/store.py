"""The `bootseer deps` commands on the snapshots of a store: restore, ls, inspect, verify, gc."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.deps.direct import CHOICES, make_settings
from bootseer.cli.deps.group import cache_option, sign_option, store_option
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.cli.shared.sizes import format_size, parse_size
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.depsnap.format.index_records import Index
    from bootseer.depsnap.store.records import Published
    from bootseer.storage.store import Store


def _open_store(url: str | None) -> Store:
    """Open the store, without a URL the default one.

    Raises NotFoundError for a named directory that does not exist, most often a mistyped one.
    """
    from bootseer.config.loading import default_store
    from bootseer.storage.open import open_store

    store = open_store(url or default_store())
    inside = store.local_path("x")
    if url and inside and not os.path.isdir(os.path.dirname(inside)):
        raise NotFoundError(f"there is no store at {store.url}; check --store")
    return store


def _find_key(store: Store, prefix: str) -> str:
    """Return the key that starts with `prefix`. Raises NotFoundError; UsageError for several."""
    from bootseer.depsnap.store import records

    keys = [key for key in records.list_keys(store) if key.startswith(prefix)]
    if not keys:
        raise NotFoundError(f"no snapshot {prefix} in {store.url}; `bootseer deps ls` lists them")
    if len(keys) > 1:
        raise UsageError(f"{len(keys)} snapshots start with {prefix}; give more of the key")
    return keys[0]


def _find_snapshot(store: Store, name: str, sign_key: str | None = None) -> Published:
    """Return the snapshot KEY:N, or for KEY its newest usable one. Raises NotFoundError."""
    from bootseer.depsnap.store import record_file, records

    prefix, colon, number = name.partition(":")
    if colon and not number.isdecimal():
        raise UsageError(f"{name}: behind the colon stands a number, as `bootseer deps ls` prints")
    key = _find_key(store, prefix)
    secret = record_file.read_sign_key(sign_key)
    if colon:
        generations = [int(number)], records.list_generations(store, key)[1]
        snapshot = next(records.find_usable(store, key, secret, generations), None)
    else:
        snapshot = records.find_newest(store, key, secret)
    if snapshot is None:
        raise NotFoundError(f"nothing usable is published for {name} in {store.url}")
    return snapshot


@click.command("restore")
@store_option
@cache_option
@sign_option
@click.option("--form", type=click.Choice(CHOICES["form"]), default="auto", show_default=True)
@click.option("--read-only", is_flag=True, help="Nothing will write there: allows faster forms.")
@click.option("--allow-setuid", is_flag=True, help="Keep setuid and setgid bits.")
@click.option(
    "--to",
    "moved",
    multiple=True,
    metavar="ROOT=DIR",
    help="Put a recorded root elsewhere; repeatable. Scripts keep the recorded path inside.",
)
@json_option
@click.argument("key")
def restore_command(
    key: str,
    store: str | None,
    cache: str | None,
    sign_key: str | None,
    read_only: bool,
    moved: tuple[str, ...],
    as_json: bool,
    **rest: Any,
) -> int:
    """Put the snapshot KEY (or the start of its key) in place, and say by which form and why."""
    from bootseer.depsnap import placement
    from bootseer.depsnap.restore import commit

    opened = _open_store(store)
    record = _find_snapshot(opened, key, sign_key).record
    moves = dict(_parse_move(text, record.roots) for text in moved)
    targets = {root: moves.get(root, root) for root in record.roots}
    settings = make_settings(store, cache, sign_key=sign_key, writable=not read_only, **rest)
    for directory in targets.values():
        commit.recover(directory)
    begun_s = time.monotonic()
    placed = placement.place(opened, settings, record, targets)
    took_s = time.monotonic() - begun_s
    if as_json:
        body = {"key": record.key, **dataclasses.asdict(placed), "seconds": round(took_s, 4)}
        echo_json({**body, "targets": list(targets.values())})
    else:
        size = format_size(placed.raw_bytes)
        click.echo(f"{placed.form} ({placed.why}): {size} in {took_s:.2f} s")
    return 0


def _parse_move(text: str, roots: tuple[str, ...]) -> tuple[str, str]:
    """Parse ROOT=DIR, with one of these roots. Raises UsageError."""
    root, equals, directory = text.partition("=")
    if not equals or root not in roots:
        raise UsageError(f"--to {text}: give ROOT=DIR with one of {', '.join(roots)}")
    return root, os.path.abspath(directory)


@click.command("ls")
@store_option
@json_option
def ls_command(store: str | None, as_json: bool) -> int:
    """List the snapshots of a store, newest first."""
    from bootseer.depsnap.store import records

    opened = _open_store(store)
    rows: list[dict[str, Any]] = []
    for key in records.list_keys(opened):
        damaged: list[BootseerError] = []
        try:
            usable = records.find_usable(opened, key, on_damaged=damaged.append)
            rows.extend(
                {**dataclasses.asdict(snapshot.record), "generation": snapshot.generation}
                for snapshot in usable
            )
        except BootseerError as error:
            damaged.append(error)
        rows += [{"key": key, "problem": str(error)} for error in damaged]
    rows.sort(key=lambda row: -row.get("created_unix_s", 0))
    if as_json:
        echo_json(rows)
        return 0
    for row in rows:
        if "problem" in row:
            click.echo(f"{row['key'][:12]}  {row['problem']}")
            continue
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created_unix_s"]))
        stored, raw = (format_size(row["archive"][name]) for name in ("size", "raw_bytes"))
        click.echo(
            f"{row['key'][:12]}:{row['generation']}  {created}  {stored:>10}  {raw:>10}  "
            f"{row['install_s']:7.1f} s  {' '.join(row['command'])[:60]}"
        )
    return 0


@click.command("inspect")
@store_option
@json_option
@click.option("--files", is_flag=True, help="List every entry.")
@click.argument("key")
def inspect_command(key: str, store: str | None, as_json: bool, files: bool) -> int:
    """Show what the snapshot KEY is and holds: sizes, packages, what the install deleted.

    KEY:N is a certain one of the key's, KEY the newest."""
    from bootseer.config.loading import default_cache
    from bootseer.depsnap.format.index import read_index
    from bootseer.depsnap.store import archive_access, record_file

    opened = _open_store(store)
    record = _find_snapshot(opened, key).record
    with archive_access.local_archive(opened, record, default_cache()) as path:
        index = read_index(
            path,
            expected_digest=record.archive.index_digest,
            limits=record_file.limits_of(record),
        )
    packages = _sum_packages(index)
    deleted = {root.root: list(root.deleted) for root in index.roots if root.deleted}
    if as_json:
        body = {**dataclasses.asdict(record), "packages": packages, "deleted": deleted}
        if files:
            body["files"] = [list(entry) for entry in _list_entries(index)]
        echo_json(body)
        return 0
    click.echo(f"key       {record.key}")
    click.echo(f"command   {' '.join(record.command)}")
    click.echo(f"roots     {' '.join(record.roots)}")
    click.echo(
        f"size      {format_size(record.archive.size)} stored, "
        f"{format_size(record.archive.raw_bytes)} raw, {record.archive.entries} entries"
    )
    click.echo(f"times     install {record.install_s:.1f} s, publish {record.publish_s:.1f} s")
    for name, size in list(packages.items())[:20]:
        click.echo(f"{format_size(size):>12}  {name}")
    for root, paths in deleted.items():
        click.echo(f"deleted   {len(paths)} below {root}")
    if files:
        for path, kind, size in _list_entries(index):
            click.echo(f"{kind} {size:>12} {path}")
    return 0


def _list_entries(index: Index) -> list[tuple[str, str, int]]:
    """Return path, kind and size in bytes of every entry."""
    entries = []
    for root in index.roots:
        for number in range(root.first, root.first + root.count):
            path = os.path.join(root.root, index.path[number])
            entries.append((path, index.kind[number], index.size[number]))
    return entries


def _sum_packages(index: Index) -> dict[str, int]:
    """Return the bytes of each package, the largest first.

    A package is an entry of a site-packages directory; without one, of the root.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for path, size in zip(index.path, index.size, strict=True):
        parts = path.split("/")
        parent = next((n for n, part in enumerate(parts) if part.endswith("-packages")), -1)
        if size and len(parts) > parent + 1:
            sizes[parts[parent + 1]] += size
    return dict(sizes.most_common())


@click.command("verify")
@store_option
@sign_option
@click.option(
    "--mark", is_flag=True, help="Mark bad snapshots, so that the next start replaces them."
)
@json_option
@click.argument("key", required=False)
def verify_command(
    key: str | None, store: str | None, sign_key: str | None, mark: bool, as_json: bool
) -> int:
    """Read KEY, or every snapshot, whole and check each byte. Exit code 6 when one is bad."""
    from bootseer.depsnap.store import record_file, records

    opened = _open_store(store)
    keys = [_find_key(opened, key)] if key else records.list_keys(opened)
    secret = record_file.read_sign_key(sign_key)
    rows = [row for each in keys for row in _verify_key(opened, each, secret, mark)]
    if key and not rows:
        raise NotFoundError(f"nothing usable is published for {key} in {opened.url}; see `deps ls`")
    if as_json:
        echo_json(rows)
    else:
        for row in rows:
            click.echo(f"{row['key'][:12]}:{row['generation']}  {row['problem'] or 'good'}")
    bad = [row for row in rows if row["problem"]]
    if bad:
        raise CorruptDataError(f"{len(bad)} of {len(rows)} snapshots are not good; see above")
    return 0


def _verify_key(store: Store, key: str, sign_key: bytes | None, mark: bool) -> list[dict[str, Any]]:
    """Verify each snapshot of a key; return a row each, with its problem or "".

    There is no row for a key whose install changed nothing.
    """
    from bootseer.depsnap.store import records

    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\rverifying {key[:12]} ...\r")
    rows: list[dict[str, Any]] = []

    def add_row(problem: str, generation: int, *, unsigned: bool = False) -> None:
        rows.append({"key": key, "generation": generation, "problem": problem})
        if mark and problem and generation and not unsigned:
            records.condemn(store, key, generation, problem)

    def add_damaged(error: records.BadRecordError) -> None:
        add_row(str(error), error.generation, unsigned=error.unsigned)

    try:
        for snapshot in records.find_usable(store, key, sign_key, on_damaged=add_damaged):
            add_row(_verify_snapshot(store, snapshot), snapshot.generation)
    except (CorruptDataError, NotFoundError) as error:
        add_row(str(error), 0)
    return rows


def _verify_snapshot(store: Store, snapshot: Published) -> str:
    """Read one snapshot whole; return what is wrong with it, or ""."""
    from bootseer.config.loading import default_cache
    from bootseer.depsnap.format.index import read_index
    from bootseer.depsnap.format.verifier import verify
    from bootseer.depsnap.store import archive_access, record_file

    archive = snapshot.record.archive
    limits = record_file.limits_of(snapshot.record)
    try:
        with archive_access.local_archive(store, snapshot.record, default_cache()) as path:
            index = read_index(path, expected_digest=archive.index_digest, limits=limits)
            if verify(path, index) != archive.tree_digest:
                raise CorruptDataError("its content has another digest than its record says")
    except (CorruptDataError, NotFoundError) as error:
        return str(error)
    return ""


@click.command("gc")
@store_option
@cache_option
@click.option("--max-age", type=click.FloatRange(min=0), metavar="DAYS", help="Remove older ones.")
@click.option(
    "--max-size", callback=parse_size, metavar="SIZE", help="Remove the oldest beyond, as 500G."
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc_command(
    store: str | None,
    cache: str | None,
    max_age: float | None,
    max_size: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove leftovers of killed writers, and snapshots by age and size.

    With --cache, the same rules hold for this node's shared trees. Nothing in use is removed.
    """
    from bootseer.depsnap.settings import DAY_S
    from bootseer.depsnap.store import gc, records

    opened = _open_store(store)
    age_s = None if max_age is None else max_age * DAY_S
    removals: list[gc.Removal] = []
    if records.list_keys(opened):
        states = gc.survey(opened)
        removals = gc.plan(states, gc.now_s(opened), max_age_s=age_s, max_size_bytes=max_size)
    trees = []
    if cache:
        trees = gc.plan_trees(cache, time.time(), max_age_s=age_s, max_size_bytes=max_size)
    freed_bytes = sum(removal.size_bytes for removal in [*removals, *trees])
    if not dry_run:
        freed_bytes = gc.carry_out(opened, removals)
        freed_bytes += gc.carry_out_trees(cache, trees, time.time()) if cache else 0
    if as_json:
        rows = [dataclasses.asdict(removal) for removal in [*removals, *trees]]
        echo_json({"dry_run": dry_run, "bytes": freed_bytes, "removed": rows})
        return 0
    for removal in [*removals, *trees]:
        click.echo(f"{removal.why:>20}  {format_size(removal.size_bytes):>10}  {removal.name}")
    click.echo(f"{format_size(freed_bytes)} {'would be ' if dry_run else ''}freed")
    return 0
