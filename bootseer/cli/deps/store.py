"""The `bootseer deps` commands that look at a store: restore, ls, inspect, verify, gc."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.deps.direct import settings_of
from bootseer.cli.deps.group import cache_option, sign_option, store_option
from bootseer.cli.shared.options import json_option
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.depsnap.format.index_records import Index
    from bootseer.depsnap.store.records import Published
    from bootseer.storage.store import Store

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _open(store: str | None) -> Store:
    """The store; NotFoundError for a named directory that is not there, most often a slip."""
    from bootseer.config.loading import default_store
    from bootseer.storage.open import open_store

    opened = open_store(store or default_store())
    inside = opened.local_path("x")
    if store and inside and not os.path.isdir(os.path.dirname(inside)):
        raise NotFoundError(f"there is no store at {opened.url}; check --store")
    return opened


def _full_key(store: Store, prefix: str) -> str:
    """The one key that starts so. Raises NotFoundError and, for several, UsageError."""
    from bootseer.depsnap.store import records

    keys = [k for k in records.list_keys(store) if k.startswith(prefix)]
    if not keys:
        raise NotFoundError(f"no snapshot {prefix} in {store.url}; `bootseer deps ls` lists them")
    if len(keys) > 1:
        raise UsageError(f"{len(keys)} snapshots start with {prefix}; give more of the key")
    return keys[0]


def _find(store: Store, name: str, sign_key: str | None = None) -> Published:
    """The snapshot KEY:N, or the newest usable one of KEY."""
    from bootseer.depsnap.store import record_file, records

    prefix, colon, number = name.partition(":")
    if colon and not number.isdecimal():
        raise UsageError(f"{name}: behind the colon stands a number, as `bootseer deps ls` prints")
    key = _full_key(store, prefix)
    secret = record_file.read_sign_key(sign_key)
    if colon:
        one = [int(number)], records.list_generations(store, key)[1]
        published = next(records.find_usable(store, key, secret, one), None)
    else:
        published = records.find_newest(store, key, secret)
    if published is None:
        raise NotFoundError(f"nothing usable is published for {name} in {store.url}")
    return published


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _bytes(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise click.BadParameter("give bytes, or a number with K, M, G or T")
    return int(float(number) * _UNITS[unit])


@click.command("restore")
@store_option
@cache_option
@sign_option
@click.option(
    "--form",
    type=click.Choice(
        ["auto", "archive", "overlay", "bind", "symlink", "reflink", "hardlink", "copy"]
    ),
    default="auto",
    show_default=True,
)
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

    opened = _open(store)
    record = _find(opened, key, sign_key).record
    pairs = dict(_pair(text, record.roots) for text in moved)
    targets = {root: pairs.get(root, root) for root in record.roots}
    settings = settings_of(store, cache, sign_key=sign_key, writable=not read_only, **rest)
    for place in targets.values():
        commit.recover(place)
    begun = time.monotonic()
    done = placement.place(opened, settings, record, targets)
    took_s = time.monotonic() - begun
    if as_json:
        body = {"key": record.key, **dataclasses.asdict(done), "seconds": round(took_s, 4)}
        click.echo(json.dumps({**body, "targets": list(targets.values())}, indent=1))
    else:
        click.echo(f"{done.form} ({done.why}): {_size(done.raw_bytes)} in {took_s:.2f} s")
    return 0


def _pair(text: str, roots: tuple[str, ...]) -> tuple[str, str]:
    root, equals, place = text.partition("=")
    if not equals or root not in roots:
        raise UsageError(f"--to {text}: give ROOT=DIR with one of {', '.join(roots)}")
    return root, os.path.abspath(place)


@click.command("ls")
@store_option
@json_option
def ls_command(store: str | None, as_json: bool) -> int:
    """List the snapshots of a store, newest first."""
    from bootseer.depsnap.store import records

    opened = _open(store)
    rows: list[dict[str, Any]] = []
    for key in records.list_keys(opened):
        damaged: list[BootseerError] = []
        try:
            usable = records.find_usable(opened, key, on_damaged=damaged.append)
            rows.extend(
                {**dataclasses.asdict(published.record), "generation": published.generation}
                for published in usable
            )
        except BootseerError as error:
            damaged.append(error)
        rows += [{"key": key, "problem": str(error)} for error in damaged]
    rows.sort(key=lambda row: -row.get("created_unix_s", 0))
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        if "problem" in row:
            click.echo(f"{row['key'][:12]}  {row['problem']}")
            continue
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created_unix_s"]))
        sizes = f"{_size(row['archive']['size']):>10}  {_size(row['archive']['raw_bytes']):>10}"
        click.echo(
            f"{row['key'][:12]}:{row['generation']}  {day}  {sizes}  {row['install_s']:7.1f} s  "
            f"{' '.join(row['command'])[:60]}"
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

    opened = _open(store)
    record = _find(opened, key).record
    with archive_access.local_archive(opened, record, default_cache()) as path:
        index = read_index(
            path,
            expected_digest=record.archive.index_digest,
            limits=record_file.limits_of(record),
        )
    packages = _packages(index)
    deleted = {root.root: list(root.deleted) for root in index.roots if root.deleted}
    if as_json:
        body = {**dataclasses.asdict(record), "packages": packages, "deleted": deleted}
        if files:
            body["files"] = [list(row) for row in _entries(index)]
        click.echo(json.dumps(body, indent=1))
        return 0
    click.echo(f"key       {record.key}")
    click.echo(f"command   {' '.join(record.command)}")
    click.echo(f"roots     {' '.join(record.roots)}")
    click.echo(
        f"size      {_size(record.archive.size)} stored, {_size(record.archive.raw_bytes)} raw,"
        f" {record.archive.entries} entries"
    )
    click.echo(f"times     install {record.install_s:.1f} s, publish {record.publish_s:.1f} s")
    for name, size in list(packages.items())[:20]:
        click.echo(f"{_size(size):>12}  {name}")
    for root, paths in deleted.items():
        click.echo(f"deleted   {len(paths)} below {root}")
    if files:
        for path, kind, size in _entries(index):
            click.echo(f"{kind} {size:>12} {path}")
    return 0


def _entries(index: Index) -> list[tuple[str, str, int]]:
    rows = []
    for root in index.roots:
        for number in range(root.first, root.first + root.count):
            path = os.path.join(root.root, index.path[number])
            rows.append((path, index.kind[number], index.size[number]))
    return rows


def _packages(index: Index) -> dict[str, int]:
    """Bytes by what lies directly in a site-packages (or, without one, in the root)."""
    sizes: collections.Counter[str] = collections.Counter()
    for path, size in zip(index.path, index.size, strict=True):
        parts = path.split("/")
        place = next((n for n, p in enumerate(parts) if p.endswith("-packages")), -1)
        if size and len(parts) > place + 1:
            sizes[parts[place + 1]] += size
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

    opened = _open(store)
    wanted = [_full_key(opened, key)] if key else records.list_keys(opened)
    secret = record_file.read_sign_key(sign_key)
    rows = [row for each in wanted for row in _verify(opened, each, secret, mark)]
    if key and not rows:
        raise NotFoundError(f"nothing usable is published for {key} in {opened.url}; see `deps ls`")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        for row in rows:
            click.echo(f"{row['key'][:12]}:{row['generation']}  {row['problem'] or 'good'}")
    bad = [row for row in rows if row["problem"]]
    if bad:
        raise CorruptDataError(f"{len(bad)} of {len(rows)} snapshots are not good; see above")
    return 0


def _verify(store: Store, key: str, sign_key: bytes | None, mark: bool) -> list[dict[str, Any]]:
    """What is wrong with each of a key's snapshots; none where an install had no effect."""
    from bootseer.depsnap.store import records

    if sys.stderr.isatty():
        sys.stderr.write(f"\rverifying {key[:12]} ...\r")
    rows: list[dict[str, Any]] = []

    def report(problem: str, generation: int, *, unsigned: bool = False) -> None:
        rows.append({"key": key, "generation": generation, "problem": problem})
        if mark and problem and generation and not unsigned:
            records.condemn(store, key, generation, problem)

    def report_damaged(error: records.BadRecordError) -> None:
        report(str(error), error.generation, unsigned=error.unsigned)

    try:
        for published in records.find_usable(store, key, sign_key, on_damaged=report_damaged):
            report(_problem_of(store, published), published.generation)
    except (CorruptDataError, NotFoundError) as error:
        report(str(error), 0)
    return rows


def _problem_of(store: Store, published: Published) -> str:
    """Read one snapshot whole: what is wrong with it, or nothing."""
    from bootseer.config.loading import default_cache
    from bootseer.depsnap.format.index import read_index
    from bootseer.depsnap.format.verifier import verify
    from bootseer.depsnap.store import archive_access, record_file

    archive = published.record.archive
    limits = record_file.limits_of(published.record)
    try:
        with archive_access.local_archive(store, published.record, default_cache()) as path:
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
    "--max-size", callback=_bytes, metavar="SIZE", help="Remove the oldest beyond, as 500G."
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

    opened = _open(store)
    age_s = None if max_age is None else max_age * DAY_S
    removals: list[gc.Removal] = []
    if records.list_keys(opened):
        states = gc.survey(opened)
        removals = gc.plan(states, gc.now_s(opened), max_age_s=age_s, max_size_bytes=max_size)
    trees = []
    if cache:
        trees = gc.plan_trees(cache, time.time(), max_age_s=age_s, max_size_bytes=max_size)
    freed = sum(r.size_bytes for r in [*removals, *trees])
    if not dry_run:
        freed = gc.carry_out(opened, removals)
        freed += gc.carry_out_trees(cache, trees, time.time()) if cache else 0
    if as_json:
        rows = [dataclasses.asdict(r) for r in [*removals, *trees]]
        click.echo(json.dumps({"dry_run": dry_run, "bytes": freed, "removed": rows}, indent=1))
        return 0
    for removal in [*removals, *trees]:
        click.echo(f"{removal.why:>20}  {_size(removal.size_bytes):>10}  {removal.name}")
    click.echo(f"{_size(freed)} {'would be ' if dry_run else ''}freed")
    return 0
