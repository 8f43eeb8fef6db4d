"""Writers cut by a template give what searching their lines gives, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report import generate
from bootseer.profiler.report.load import templates as templates_module
from bootseer.profiler.report.load.line_blocks import pack_lines
from bootseer.profiler.report.load.templates import Templates
from tests.support.examples import examples
from tests.support.samples.event_files import EventFile
from tests.unit.profiler.report.load.test_line_blocks import HOSTILE, in_writers_form


def block_of(*ranks: int, late_s: float = 0.0) -> bytes:
    """A node's file: ranks whose phases follow each other, with equal names and attributes."""
    lines: list[str] = []
    EventFile.count = 17 * ranks[0]
    for rank in ranks:
        file = EventFile("a", rank, trace="1" * 32)
        file.span("imports", late_s + rank, late_s + rank + 1).span("job", 9, 20, wait=True)
        lines += file.span("compile", 21, 30 + rank, bootseer__bytes=7).lines
    return b"".join(map(in_writers_form, lines))


def learned() -> Templates:
    templates = Templates()
    assert pack_lines(block_of(0), whole=True, templates=templates)
    return templates


def test_equal_ranks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = learned()
    block = block_of(1, 2, 3, late_s=0.5)
    searched = pack_lines(block, whole=True)
    monkeypatch.setattr(templates_module, "_EVENT", None)  # nothing is learned
    # nor searched
    monkeypatch.setattr("bootseer.profiler.report.load.line_blocks._search_lines", None)
    found = pack_lines(block, whole=True, templates=templates)
    assert found is not None
    assert len(found) == 3
    assert repr(found) == repr(searched)


@pytest.mark.parametrize("place", range(7))
def test_hostile_lines_in_a_rank_like_the_others(place: int) -> None:
    templates = learned()
    lines = block_of(1).splitlines(keepends=True)
    assert len(lines) == 7
    tried = 0
    for old, new in HOSTILE:
        if old not in lines[place]:
            continue
        tried += 1
        changed = [*lines]
        changed[place] = lines[place].replace(old, new, 1)
        block = b"".join(changed)
        expected = repr(pack_lines(block, whole=True))
        assert repr(pack_lines(block, whole=True, templates=templates)) == expected
        assert repr(pack_lines(block, whole=True, templates=learned())) == expected
    assert tried > len(HOSTILE) / 3


@settings(max_examples=examples(400), deadline=None)
@given(
    place=st.integers(0, len(block_of(1)) - 1),
    removed=st.integers(0, 2),
    put=st.one_of(
        st.binary(max_size=2), st.sampled_from([b"0", b"9", b"a", b"A", b"-", b'"', b"\n", b" "])
    ),
)
def test_any_bytes_in_a_rank_like_the_others(place: int, removed: int, put: bytes) -> None:
    sound = block_of(1)
    block = sound[:place] + put + sound[place + removed :]
    expected = repr(pack_lines(block, whole=True))
    assert repr(pack_lines(block, whole=True, templates=learned())) == expected


@pytest.mark.parametrize("by_node", [False, True])
def test_a_generated_start(tmp_path: Path, by_node: bool) -> None:
    generate.generate(tmp_path, generate.Options(seed=3, nodes=32, by_node=by_node))
    templates, searched = Templates(), 0
    for path in sorted((tmp_path / "events").iterdir()):
        block = path.read_bytes()
        expected = pack_lines(block, whole=True)
        assert repr(pack_lines(block, whole=True, templates=templates)) == repr(expected)
        searched += expected is not None
    assert searched > 20
    assert templates.is_useful


def test_what_never_fits_is_not_tried_for_ever() -> None:
    templates = Templates()
    for number in range(2, 600):
        file = EventFile("a", 1, trace="1" * 32)
        block = b"".join(map(in_writers_form, file.span("x" * number, 0, 1).lines))
        assert pack_lines(block, whole=True, templates=templates)
    assert not templates.is_useful
    assert sum(map(len, templates._by_length.values())) <= templates_module._MAX_TEMPLATES
