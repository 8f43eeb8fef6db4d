"""The rule engine: begins, ends and points in every order that logs bring them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

import pytest

from bootseer.profiler.collect.log_rules import engine as logengine
from bootseer.profiler.collect.log_rules import rules as logrules

LOAD = "[load]\nphase = checkpoint.load\nbegin = loading\nend = loaded\n"
SECOND = 10**9


def run(
    rules: str, lines: Sequence[str], *, live: bool = True, start: int = 1000
) -> list[logengine.PhaseEvent]:
    """Feed lines one second apart."""
    engine = logengine.Engine(logrules.parse(rules, "t.ini"), live=live)
    found = []
    for number, line in enumerate(lines):
        at = (start + number) * SECOND
        found += engine.match_line(line.encode(), at, at - 500 * SECOND)
    return found + engine.close()


def brief(found: Sequence[logengine.PhaseEvent]) -> list[tuple[str, str, int]]:
    return [(f.kind, f.name, f.time_unix_nano // SECOND) for f in found]


def test_begin_and_end_by_arrival() -> None:
    found = run(LOAD, ["x", "loading", "y", "loaded"])
    assert brief(found) == [("begin", "checkpoint.load", 1001), ("end", "checkpoint.load", 1003)]
    assert found[0].mono_nano == 501 * SECOND
    assert found[0].attributes == {"bootseer.source": "log", "log.rule": "load"}


def test_a_second_begin_is_ignored_and_counted() -> None:
    found = run(LOAD, ["loading", "loading", "loading", "loaded"])
    assert brief(found) == [("begin", "checkpoint.load", 1000), ("end", "checkpoint.load", 1003)]
    assert found[1].attributes["log.begins_ignored"] == 2


def test_a_second_begin_restarts_where_the_rule_says_so() -> None:
    found = run(LOAD + "again = restart\n", ["loading", "loading", "loaded"])
    kinds = [(f.kind, f.time_unix_nano // SECOND) for f in found]
    assert kinds == [("begin", 1000), ("end", 1001), ("begin", 1001), ("end", 1002)]
    assert found[1].attributes["log.closed_by"] == "load"


def test_an_end_without_begin_is_a_point_that_says_so() -> None:
    [found] = run(LOAD, ["loaded"])
    assert found.kind == "point"
    assert "no begin" in found.attributes["bootseer.reason"]
    assert run(LOAD + "unopened = ignore\n", ["loaded"]) == []


def test_a_begin_without_end_stays_open() -> None:
    assert brief(run(LOAD, ["loading"])) == [("begin", "checkpoint.load", 1000)]


def test_the_next_phase_closes_a_former_one_only_where_asked() -> None:
    rules = "[a]\nphase = a\nbegin = A\n{}[b]\nphase = b\nbegin = B\n[c]\nphase = c\npoint = C\n"
    assert ("end", "a", 1001) in brief(run(rules.format("until = next\n"), ["A", "B", "C"]))
    assert ("end", "a", 1002) in brief(run(rules.format("until = c\n"), ["A", "B", "C"]))
    assert [f for f in run(rules.format(""), ["A", "B", "C"]) if f.kind == "end"] == []


def test_ranks_in_one_stream_have_their_own_phases() -> None:
    found = run(LOAD, ["[rank0]: loading", "[rank1]: loading", "[rank1]: loaded", "loaded"])
    assert [(f.kind, f.attributes.get("bootseer.rank")) for f in found] == [
        ("begin", 0),
        ("begin", 1),
        ("end", 1),
        ("point", None),
    ]
    [found] = run(LOAD, ["[default7]:loading"])
    assert found.attributes["bootseer.local_rank"] == 7


def test_once_is_once_a_lane() -> None:
    rules = "[s]\nphase = first_step\npoint = step \\d+\nonce = true\n"
    lines = ["[rank0]: step 5", "[rank0]: step 6", "[rank1]: step 5"]
    assert [f.attributes["bootseer.rank"] for f in run(rules, lines)] == [0, 1]


def test_a_rule_that_floods_is_silenced_and_named() -> None:
    rules = "[flood]\nphase = x\npoint = y\n"
    found = run(rules, ["y"] * (logengine.EVENTS_MAX + 7))
    assert len(found) == logengine.EVENTS_MAX + 1
    assert (found[-1].name, found[-1].status) == ("log_rules", "fallback")
    assert "rule flood" in found[-1].attributes["bootseer.reason"]
    assert "7 further" in found[-1].attributes["bootseer.reason"]


def test_named_groups_become_attributes() -> None:
    rules = "[g]\nphase = x\npoint = read (?P<bytes>\\d+) rank (?P<rank>\\d+) of (?P<what>\\S+)\n"
    [found] = run(rules, ["read 123 rank 4 of " + "z" * 999])
    assert found.attributes["bootseer.bytes"] == 123
    assert found.attributes["bootseer.rank"] == 4
    assert found.attributes["log.what"] == "z" * logengine.TEXT_MAX


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("(?P<duration>\\S+)", "1.5s"),
        ("(?P<duration_s>\\S+)", "1.5"),
        ("(?P<duration_ms>\\S+)", "1500.0"),
    ],
)
def test_a_stated_duration_gives_a_whole_span(group: str, text: str) -> None:
    found = run(f"[d]\nphase = x\nend = took {group}\n", ["took " + text])
    assert [f.kind for f in found] == ["begin", "end"]
    assert found[1].time_unix_nano - found[0].time_unix_nano == 1_500_000_000
    assert found[1].mono_nano is not None
    assert found[0].mono_nano == found[1].mono_nano - 1_500_000_000


STAMPED = LOAD + "time = ^(\\S+)\ntime_format = unix\n"


def test_an_own_time_beats_the_arrival_and_keeps_the_clocks_apart() -> None:
    [found] = run(STAMPED, ["990.25 loading"])
    assert found.time_unix_nano == 990_250_000_000
    assert found.mono_nano == 490_250_000_000  # 9.75 s before an arrival at monotonic 500


def test_live_a_whole_second_that_agrees_is_coarser_than_the_arrival() -> None:
    [found] = run(STAMPED, ["999 loading"])
    assert found.time_unix_nano == 1000 * SECOND
    [found] = run(STAMPED, ["900 loading"])
    assert found.time_unix_nano == 900 * SECOND


def test_imported_lines_have_their_own_times_and_no_monotonic_one() -> None:
    found = run(STAMPED, ["10.5 loading", "12 loaded"], live=False)
    assert [f.time_unix_nano for f in found] == [10_500_000_000, 12 * SECOND]
    assert [f.mono_nano for f in found] == [None, None]


def test_imported_lines_without_a_time_are_left_out_and_counted() -> None:
    engine = logengine.Engine(logrules.parse(STAMPED, "t.ini"), live=False, near_ns=SECOND)
    assert engine.match_line(b"10 other", 0, None) == []
    assert engine.match_line(b"loading", 0, None) == []
    assert engine.undated == 1


def test_what_was_left_out_for_want_of_a_time_is_in_the_events_too() -> None:
    rules = STAMPED + "[ready]\nphase = first_step\npoint = ready\n"
    *spans, note = run(rules, ["10 loading", "20 loaded", "ready"], live=False)
    assert len(spans) == 2
    assert (note.name, note.status) == ("log_rules", "fallback")
    assert note.attributes["bootseer.reason"].endswith("unknown: ready: first_step (1)")


def test_after_an_end_without_a_time_the_phase_has_no_end_and_begins_anew() -> None:
    lines = ["10 loading", "loaded", "99 loaded", "100 loading", "103 loaded", "200 loading"]
    *spans, note = run(STAMPED, [*lines, "loaded"], live=False)
    assert brief(spans) == [
        ("begin", "checkpoint.load", 10),
        ("begin", "checkpoint.load", 100),
        ("end", "checkpoint.load", 103),
        ("begin", "checkpoint.load", 200),
    ]
    assert "(3)" in note.attributes["bootseer.reason"]


def test_an_imported_line_has_the_time_that_its_containers_log_gave_it() -> None:
    stamp = "2026-11-21T10:00:%02d.5Z "
    found = run(STAMPED, [stamp % 1 + "loading", stamp % 9 + "loaded"], live=False)
    assert (found[1].time_unix_nano - found[0].time_unix_nano) / 1e9 == 8
    whole = "[l]\nphase = x\npoint = ^2026\\S+ loading\ntime = ^(\\S+)\n"
    [point] = run(whole, [stamp % 1 + "loading"], live=False)
    assert point.time_unix_nano == found[0].time_unix_nano


def test_an_imported_end_may_state_how_long_its_phase_took() -> None:
    rules = "[d]\nphase = x\nbegin = from\nend = took (?P<duration>\\S+)\ntime = ^(\\d+) "
    found = run(rules + "\ntime_format = unix\n", ["10 from", "took 7s"], live=False)
    assert brief(found) == [("begin", "x", 10), ("end", "x", 17)]


@pytest.mark.parametrize(
    ("changed", "lines", "months"),
    [
        ("2026-11-20T09:00+00:00", ["0207 10:00:00", "0301 10:00:00"], ["2026-02", "2026-03"]),
        ("2027-01-01T09:00+00:00", ["1231 23:59:59", "0101 00:00:01"], ["2026-12", "2027-01"]),
        ("2027-11-20T09:00+00:00", ["1231 23:59:59", "0101 00:00:01"], ["2026-12", "2027-01"]),
    ],
)
def test_no_line_of_a_log_is_from_after_its_files_last_change(
    changed: str, lines: list[str], months: list[str]
) -> None:
    """Timestamps without a year, of logs that may have been copied much later."""
    rules = "[r]\nphase = x\npoint = loading\ntime = ^(\\d+ \\S+)\ntime_zone = utc\n"
    parsed = logrules.parse(rules + "time_format = %m%d %H:%M:%S\n", "t.ini")
    near_ns = int(datetime.datetime.fromisoformat(changed).timestamp()) * SECOND
    engine = logengine.Engine(parsed, live=False, near_ns=near_ns)
    found = [
        one for line in lines for one in engine.match_line(f"{line} loading".encode(), 0, None)
    ]
    moments = [
        datetime.datetime.fromtimestamp(f.time_unix_nano // SECOND, datetime.UTC) for f in found
    ]
    assert [f"{moment:%Y-%m}" for moment in moments] == months


STEPS = "[s]\nphase = first_step\npoint = step (?P<n>\\d+)\nstep = n\nonce = true\n"
STEPS_STAMPED = STEPS + "time = ^(\\S+)\ntime_format = unix\n"


@pytest.mark.parametrize(
    ("lines", "at", "estimated"),
    [
        (["100 step 1", "102 step 2"], 100, False),
        (["100 step 501", "102 step 502"], 100, False),
        (["300 step 100", "301 step 100", "500 step 200"], 102, True),
        (["300 step 5100", "500 step 5200"], 102, True),
        (["300 step 501", "498 step 600", "698 step 700"], 300, False),  # the first besides
        (["300 step 503", "320 step 513", "340 step 523"], 282, True),  # each tenth since 493
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_the_first_logged_step_is_not_the_first_step(
    lines: list[str], at: int, estimated: bool, live: bool
) -> None:
    [point] = run(STEPS_STAMPED, lines, live=live)
    assert point.time_unix_nano == at * SECOND
    assert ("log.step_estimated" in point.attributes) is estimated


def test_one_logged_step_alone_says_nothing_of_the_first() -> None:
    engine = logengine.Engine(logrules.parse(STEPS_STAMPED, "t.ini"), live=False)
    assert engine.match_line(b"300 step 100", 0, None) == []
    [note] = engine.close()
    assert (note.status, note.name) == ("fallback", "log_rules")
    assert "step 100" in note.attributes["bootseer.reason"]


START = (
    "[s]\nphase = first_step\nbegin = from step (?P<n>\\d+)\nend = at step (?P<n>\\d+)\n"
    "step = n\nonce = true\ntime = ^(\\S+)\ntime_format = unix\n"
)


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        (["100 from step 106", "130 at step 110", "150 at step 120"], 122),  # 4 before, 2 s each
        (["100 from step 106", "130 at step 106", "150 at step 120"], 130),
        (["100 from step 1", "130 at step 10", "150 at step 20"], 112),
    ],
)
def test_a_begin_may_say_which_step_is_the_first(lines: list[str], ended: int) -> None:
    found = run(START, lines, live=False)
    assert brief(found) == [("begin", "first_step", 100), ("end", "first_step", ended)]


def test_steps_may_be_counted_from_nought() -> None:
    lines = ["100 step 1", "104 step 3"]  # every second one is printed: 0 ended at 98
    [point] = run(STEPS_STAMPED + "step_from = 0\n", lines, live=False)
    assert point.time_unix_nano == 98 * SECOND
    [point] = run(STEPS_STAMPED + "step_from = 0\n", ["100 step 0"], live=False)
    assert point.time_unix_nano == 100 * SECOND


BARS = (
    "[b]\nphase = first_step\nbegin = ^bar 0/(?P<total>\\d+)\nend = ^bar [1-9]/(?P<total>\\d+)\n"
    "confirm = ^loss\nonce = true\n"
)


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        (["bar 0/9", "bar 1/9", "bar 0/5", "bar 1/5", "loss", "bar 2/5"], [1002, 1003]),
        (["bar 0/9", "bar 1/9"], []),
        (["bar 0/9", "bar 1/9", "loss"], []),
        (["bar 0/9", "loss", "bar 1/9", "loss", "bar 2/9"], [1000, 1002]),
        (["bar 0/9", "bar 1/9", "bar 0/9", "bar 1/9", "loss", "bar 2/9"], []),  # either may be it
        (["bar 0/9", "bar 1/9", "loss", "bar 2/9", "bar 0/9", "bar 1/9", "loss"], [1000, 1001]),
    ],
)
def test_a_bar_counts_once_a_line_confirms_it(lines: list[str], times: list[int]) -> None:
    found = run(BARS, lines)
    assert [f.time_unix_nano // SECOND for f in found] == times
    assert [f.kind for f in found] == ["begin", "end"][: len(times)]


def test_bars_to_confirm_are_bounded() -> None:
    lines = [f"bar {moved}/{n}" for n in range(10, 100) for moved in (0, 1)]
    assert run(BARS, [*lines, "loss", "bar 2/11"]) == []
    assert len(run(BARS, [*lines, "loss", "bar 2/99"])) == 2


@pytest.mark.parametrize(
    "rules",
    [
        BARS.replace("begin = ^bar 0/(?P<total>\\d+)\n", ""),
        BARS.replace("(?P<total>\\d+)", "\\d+"),
        BARS + "point = x\n",
    ],
)
def test_a_key_confirm_needs_two_bars_with_totals(rules: str) -> None:
    with pytest.raises(logrules.RuleFileError, match="'total'"):
        logrules.parse(rules, "t.ini")


def test_a_line_may_name_its_lane_itself() -> None:
    rules = LOAD + "lane = ^<(?P<lane>\\S+)>\n"
    found = run(rules, ["<TP0> loading", "<TP1> loading", "<TP1> loaded", "<TP0> loaded"])
    assert [(f.kind, f.attributes["log.lane"]) for f in found] == [
        ("begin", "TP0"),
        ("begin", "TP1"),
        ("end", "TP1"),
        ("end", "TP0"),
    ]
    assert all("bootseer.local_rank" not in f.attributes for f in found)
    [first, *_] = run(rules, ["[rank3]: <TP1> loading"])
    assert first.attributes["bootseer.rank"] == 3


def test_a_process_that_changes_its_name_stays_one_lane() -> None:
    found = run(LOAD, ["(Worker pid=4) loading", "(Worker_TP0 pid=4) loaded"])
    assert [f.kind for f in found] == ["begin", "end"]
    found = run(LOAD, ["(W pid=4, ip=10.0.0.1) loading", "(W pid=4, ip=10.0.0.2) loaded"])
    assert [f.kind for f in found] == ["begin", "point"]


OWN = "[l]\nphase = x\npoint = (?P<what>one|two)\ntime = (\\d\\d-\\d\\d [\\d:.]+)\n"


@pytest.mark.parametrize("zone_h", [0, 2, -5, 5.75])
def test_a_programs_own_zone_follows_from_its_containers_stamp(zone_h: float) -> None:
    """07-02 08:33:26.5 UTC, as a program in another zone than this machine writes it."""
    own = datetime.datetime(2025, 7, 2, 8, 33, 26, 500000) + datetime.timedelta(hours=zone_h)
    rules = OWN + "time_format = %m-%d %H:%M:%S.%f\n"
    lines = [f"2025-07-02T08:33:26.9Z {own:%m-%d %H:%M:%S.%f} one", "2025-07-02T08:33:27Z two"]
    one, two = run(rules, lines, live=False)
    assert (two.time_unix_nano - one.time_unix_nano) / 1e9 == 0.5
    assert one.time_unix_nano == 1751445206_500000000


def test_a_stamp_is_finer_than_whole_seconds() -> None:
    rules = OWN + "time_format = %m-%d %H:%M:%S\n"
    [one] = run(rules, ["2025-07-02T08:33:27.4Z 07-02 10:33:26 one"], live=False)
    assert one.time_unix_nano == 1751445207_400000000


def test_lines_and_those_that_matched_are_counted() -> None:
    engine = logengine.Engine(logrules.parse(LOAD, "t.ini"))
    for line in (b"loading", b"other", b"loading", b"loaded"):
        engine.match_line(line, SECOND, SECOND)
    assert (engine.lines, engine.matched) == (4, 3)


def test_two_logged_steps_that_fit_no_interval_say_nothing_of_the_first() -> None:
    [note] = run(STEPS_STAMPED, ["300 step 501", "498 step 600"], live=False)
    assert (note.status, note.name) == ("fallback", "log_rules")


def test_a_key_step_names_a_group_of_every_pattern() -> None:
    with pytest.raises(logrules.RuleFileError, match="group named 'm'"):
        logrules.parse(STEPS.replace("step = n", "step = m"), "t.ini")


def test_an_end_never_comes_before_its_begin() -> None:
    found = run(STAMPED, ["50 loading", "40 loaded"], live=False)
    assert brief(found) == [("begin", "checkpoint.load", 50), ("end", "checkpoint.load", 50)]


def test_an_end_is_moved_on_both_clocks() -> None:
    rules = LOAD + "time = ^t=(\\d+)\ntime_format = unix\n"
    found = run(rules, ["loading", "t=900 loaded"])
    assert [f.time_unix_nano // SECOND for f in found] == [1000, 1000]
    assert [f.mono_nano for f in found] == [500 * SECOND, 500 * SECOND]


@pytest.mark.parametrize("digits", ["9" * 30, "9" * 5000])
def test_numbers_without_end_count_nothing(digits: str) -> None:
    """The line of a job must never end the engine."""
    step = "[s]\nphase = first_step\npoint = step (?P<n>\\d+)?\nstep = n\n"
    assert run(step, [f"step {digits}", "step "]) == []
    load = LOAD.replace("loaded", r"loaded (?P<bytes>\d+) in (?P<duration>\d+s)")
    found = run(load, ["loading", f"loaded {digits} in {digits}s"])
    assert "bootseer.bytes" not in found[-1].attributes


def test_a_slow_rule_is_dropped_and_named_while_others_work() -> None:
    def search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        if pattern.pattern == "slow":
            raise logengine.TooSlow
        return pattern.search(text)

    rules = logrules.parse("[bad]\nphase = x\npoint = slow\n" + LOAD, "t.ini")
    engine = logengine.Engine(rules, search=search)
    first = engine.match_line(b"loading", SECOND, SECOND)
    assert [(f.name, f.status) for f in first] == [
        ("log_rules", "fallback"),
        ("checkpoint.load", "ok"),
    ]
    assert "rule bad" in first[0].attributes["bootseer.reason"]
    assert [f.name for f in engine.match_line(b"loaded", SECOND, SECOND)] == ["checkpoint.load"]
