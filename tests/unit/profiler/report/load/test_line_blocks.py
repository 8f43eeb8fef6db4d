"""Lines taken apart by a pattern give what parsing them as JSON gives, whatever is in them."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import events
from bootseer.profiler.report.load import load as loading
from bootseer.profiler.report.load.line_blocks import pack_lines
from bootseer.profiler.report.load.segments import Segment, pack_events
from tests.support.examples import examples
from tests.support.samples.event_files import EventFile
from tests.unit.profiler.report.load.test_segments import make, read

SEEDS = st.integers(0, 1 << 30)


def in_writers_form(line: str) -> bytes:
    """A line of `EventFile` as the event writer would have left it, if it is whole."""
    try:
        return json.dumps(json.loads(line), separators=(",", ":")).encode() + b"\n"
    except ValueError:
        return line.encode()


def segments_of_json(block: bytes) -> list[Segment] | None:
    counts: Counter[tuple[str, str]] = Counter()
    found = pack_events(loading._parse_events(block, "file", counts), whole=True)
    return None if counts else found


def written(folder: Path, nested: bool) -> bytes:
    """A file of the event writer itself."""
    path = folder / "node-1-abc.jsonl"
    about = {"host.name": "node", "bootseer.rank": 3, "bootseer.gpu.count": 8}
    with events.Writer(str(path), about, "c" * 32) as writer:
        first = writer.begin("imports", {"bootseer.bytes": 5})
        if nested:
            writer.end(writer.begin("deps.install", parent=first), "deps.install")
        writer.end(first, "imports", attributes={"bootseer.source": "phase", "a": [1, {"b": None}]})
        waiting = writer.begin("rendezvous", {"bootseer.wait": True})
        writer.end(waiting, "rendezvous", "error", {"error.type": "OSError"})
        if nested:
            writer.point("first_step")
            writer.begin("checkpoint.load")
    return path.read_bytes()


@pytest.mark.parametrize("nested", [False, True])
def test_the_writers_own_file_needs_no_json(tmp_path: Path, nested: bool) -> None:
    block = written(tmp_path, nested)
    found = pack_lines(block, whole=True)
    assert found is not None
    assert repr(found) == repr(segments_of_json(block))
    assert pack_lines(block, whole=False) == pack_events(
        loading._parse_events(block, "file", Counter()), whole=False
    )


HOSTILE = [
    (b'"attributes":{', b'"attributes":{"bootseer.wait":true,"bootseer.wait":false,'),
    (b'"attributes":{', b'"attributes":{"a":1},"attributes":{"bootseer.wait":true,'),
    (b'"attributes":{', b'"attributes":{"big":1' + b"0" * 400 + b","),
    (b'"attributes":{', b'"attributes":{"big":1' + b"0" * 5000 + b","),
    (b'"attributes":{', b'"attributes":{"a":NaN,"b":[Infinity,-Infinity],'),
    (b'"attributes":{', b'"attributes":{"a":' + b"[" * 50 + b"]" * 50 + b","),
    (b'"attributes":{', b'"attributes":{"a":' + b"[" * 990 + b"]" * 990 + b","),
    (b'"attributes":{', b'"attributes":{"a":' + b"[" * 9000 + b"]" * 9000 + b","),
    (b'"attributes":{', b'"attributes":{"a":"\xff",'),
    (b'"attributes":{', b'"attributes":{"a":"\xed\xa0\x80",'),
    (b'"attributes":{', b'"attributes":{"a":"\\ud800 \\u0000 \\n",'),
    (b'"attributes":{', '"attributes":{"a":"\u2028\x85é",'.encode()),
    (b'"attributes":{', b'"attributes":{"a":"\t",'),
    (b'"attributes":{', b'"attributes":[],"x":{'),
    (b'"attributes":{', b'"attributes":null,"x":{'),
    (b"}}", b'},"v":2}'),
    (b"}}", b'},"name":"other"}'),
    (b"}}", b'},"attributes":{}}'),
    (b"}}", b"} }"),
    (b"}}\n", b"}}\r\n"),
    (b"}}\n", b"}}\n\n"),
    (b"}}\n", b"}} {}\n"),
    (b"}}\n", b"}},{}\n"),
    (b"}}\n", b"}}"),
    (b'{"v"', b' {"v"'),
    (b'{"v"', b'[{"v"'),
    (b'{"v"', b'\xef\xbb\xbf{"v"'),
    (b'"v":1', b'"v":1.0'),
    (b'"v":1', b'"v":2'),
    (b'"event":"begin"', b'"event":"end"'),
    (b'"event":"begin"', b'"event":"point"'),
    (b'"event":"begin"', b'"event":"resource"'),
    (b'"event":"end"', b'"event":"begin"'),
    (b'"event":"end"', b'"event":"resource"'),
    (b'"event":"end"', b'"event":"later"'),
    (b'"event":"resource"', b'"event":"begin"'),
    (b'"trace_id":"1', b'"trace_id":"3'),
    (b'"trace_id":"1', b'"trace_id":"\\u0031'),
    (b'"trace_id":"', b'"trace_id":7,"x":"'),
    (b'"span_id":"0', b'"span_id":"1'),
    (b'"span_id":"0', b'"span_id":"A'),
    (b'"span_id":"0', b'"span_id":"00'),
    (b'"span_id":"', b'"span_id":null,"x":"'),
    (b'"parent_span_id":null', b'"parent_span_id":""'),
    (b'"parent_span_id":null', b'"parent_span_id":"0"'),
    (b'"parent_span_id":null', b'"parent_span_id":0'),
    (b'"name":"', b'"name":"\\"'),
    (b'"name":"', '"name":"é'.encode()),
    (b'"name":"', b'"name":"","x":"'),
    (b'"name":"imports', b'"name":"other'),
    (b'"time_unix_nano":1', b'"time_unix_nano":3'),
    (b'"time_unix_nano":1', b'"time_unix_nano":9'),
    (b'"time_unix_nano":1', b'"time_unix_nano":-1'),
    (b'"time_unix_nano":1', b'"time_unix_nano":01'),
    (b'"time_unix_nano":1', b'"time_unix_nano":1e3,"x":1'),
    (b'"mono_nano":', b'"mono_nano":-'),
    (b'"mono_nano":', b'"mono_nano":0,"x":'),
    (b'"mono_nano":', b'"mono_nano":0'),
    (b'"mono_nano":', b'"mono_nano":999999999'),
    (b'"mono_nano":', b'"mono_nano":null,"x":'),
    (b'"mono_nano":', b'"mono_nano":17,"x":'),
    (b'"status":"ok"', b'"status":""'),
    (b'"status":"ok"', b'"status":"error"'),
    (b'"status":"ok"', b'"status":null'),
]


def compare(folder: Path, *, block_bytes: int | None = None) -> None:
    """What is loaded with the pattern and without it is the same, to the types of values."""
    with pytest.MonkeyPatch.context() as patch:
        if block_bytes is not None:
            patch.setattr(loading, "_FIRST_BYTES", block_bytes)
            patch.setattr(loading, "_BLOCK_BYTES", block_bytes)
        by_lines = repr(read(folder))
        patch.setattr(loading, "pack_lines", lambda block, whole, templates: None)
        assert repr(read(folder)) == by_lines


def sound_file() -> list[bytes]:
    """The lines of two writers: one's phases follow each other, the other's are nested."""
    EventFile.count = 0
    one = EventFile("a", 0, trace="1" * 32).span("imports", 0, 1).span("job", 2, 3, wait=True)
    other = EventFile("a", 1, trace="1" * 32).span("imports", 0, None, within="0" * 16)
    other.span("compile", 1, 2, within=other.last, bootseer__bytes=7).point("first_step", 3)
    return [in_writers_form(line) for line in one.lines + other.lines]


@pytest.mark.parametrize("place", range(10))
def test_hostile_lines(tmp_path: Path, place: int) -> None:
    lines = sound_file()
    assert len(lines) == 10
    assert pack_lines(b"".join(lines), whole=True) is not None
    tried = 0
    for old, new in HOSTILE:
        if old not in lines[place]:
            continue
        tried += 1
        changed = [*lines]
        changed[place] = lines[place].replace(old, new, 1)
        folder = tmp_path / str(tried)
        folder.mkdir()
        (folder / "a-1-abc.jsonl").write_bytes(b"".join(changed))
        compare(folder)
    assert tried > len(HOSTILE) / 2


@pytest.mark.parametrize(
    "places",
    [
        (0, 1, 2, 1, 2, 3, 4),  # a phase twice
        (0, 1, 2, 3, 4, 0, 1, 2, 3, 4),
        (0, 1, 2, 2),
        (0, 1, 1, 2),
        (0, 1, 3, 4, 2),
        (0, 2, 1),
        (0,),
        (0, 5),
        (0, 5, 1, 2, 6, 3, 4, 9),
        (1, 2, 0, 3, 4),
    ],
)
def test_lines_in_another_order(tmp_path: Path, places: tuple[int, ...]) -> None:
    lines = sound_file()
    (tmp_path / "a-1-abc.jsonl").write_bytes(b"".join(lines[place] for place in places))
    compare(tmp_path)


def test_the_end_of_a_resource_line(tmp_path: Path) -> None:
    lines = sound_file()
    lines.insert(1, lines[0].replace(b'"event":"resource"', b'"event":"end"'))
    for number, kept in enumerate((lines, lines[:4], lines[:3])):  # the last has one open phase
        (tmp_path / f"a-{number}-abc.jsonl").write_bytes(b"".join(kept))
        assert pack_lines(b"".join(kept), whole=True) is None
        compare(tmp_path)


def test_attributes_at_the_parsers_depth_limit(tmp_path: Path) -> None:
    """How deep the parser reads depends on what is around the attributes, so deep ones are never
    parsed alone: one way would have an event where the other has a torn line."""
    lines = sound_file()
    path = tmp_path / "a-1-abc.jsonl"

    def kinds(depth: int) -> list[str]:
        about = b'"attributes":{"a":' + b"[" * depth + b"]" * depth + b"}}"
        deep = lines[1].replace(b'"attributes":{}}', about)
        assert deep != lines[1]
        path.write_bytes(b"".join([lines[0], deep, *lines[2:]]))
        return [problem.kind for problem in loading.load([str(tmp_path)]).problems]

    low, high = 64, 200_000
    sound, torn = kinds(low), kinds(high)
    assert "torn-line" in torn
    while high - low > 1:  # where the limit is depends on the Python
        middle = (low + high) // 2
        low, high = (middle, high) if kinds(middle) == sound else (low, middle)
    depths = range(low - 20, high + 20)
    by_lines = [kinds(depth) for depth in depths]
    for depth in depths:
        kinds(depth)
        assert pack_lines(path.read_bytes(), whole=True) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "pack_lines", lambda block, whole, templates: None)
        assert [kinds(depth) for depth in depths] == by_lines
    assert sound in by_lines
    assert torn in by_lines


def rewrite(folder: Path, seed: int) -> None:
    """Bring the folder's files into the writer's form, but for a few lines, and spoil a few."""
    rng = random.Random(seed)
    for path in sorted(folder.iterdir()):
        lines = []
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            line = text.encode() if rng.random() < 0.02 else in_writers_form(text)
            if rng.random() < 0.03:
                line = line.replace(*rng.choice(HOSTILE), 1)
            lines.append(line)
        path.unlink()  # ext4 writes a file to the disk at once that is truncated and written again
        path.write_bytes(b"".join(lines))


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEEDS)
def test_lines_give_what_json_gives(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "events"
    try:
        make(folder, seed)
        rewrite(folder, seed)
        compare(folder)
    finally:
        shutil.rmtree(folder)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEEDS, st.integers(300, 3000))
def test_files_of_several_blocks(tmp_path: Path, seed: int, block_bytes: int) -> None:
    folder = tmp_path / "events"
    try:
        make(folder, seed)
        rewrite(folder, seed)
        compare(folder, block_bytes=block_bytes)
    finally:
        shutil.rmtree(folder)
