"""Lines, lanes and times: whatever way the bytes arrive."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.profiler.collect.log_rules import lines

NEAR_NS = 1_795_288_000 * 10**9  # 2026-11-21T19:06:40Z


def whole(data: bytes, limit: int = lines.LINE_MAX_BYTES) -> list[bytes]:
    splitter = lines.LineSplitter(limit)
    return splitter.feed(data) + splitter.flush()


@given(st.binary(max_size=60), st.integers(1, 9))
def test_lines_do_not_depend_on_how_the_stream_is_cut(data: bytes, limit: int) -> None:
    for step in range(1, max(2, len(data))):
        splitter = lines.LineSplitter(limit)
        got = [
            line for at in range(0, len(data), step) for line in splitter.feed(data[at : at + step])
        ]
        assert got + splitter.flush() == whole(data, limit)


@given(st.binary(max_size=80))
def test_no_byte_of_a_short_line_is_lost(data: bytes) -> None:
    kept = [part for part in data.replace(b"\r", b"\n").split(b"\n") if part]
    assert whole(data) == kept


def test_a_long_line_is_cut_once_and_the_next_is_whole() -> None:
    splitter = lines.LineSplitter(8)
    assert splitter.feed(b"a" * 9) == [b"a" * 8]
    assert splitter.feed(b"a" * 10_000) == []
    assert splitter.feed(b"\nnext\n") == [b"next"]


def test_after_a_gap_the_torn_line_is_left_out() -> None:
    splitter = lines.LineSplitter()
    splitter.feed(b"half a li")
    splitter.mark_gap()
    assert splitter.feed(b"ne of another\nwhole\n") == [b"whole"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x1b[1;32mgreen\x1b[0m done", "green done"),
        (b"\x1b]0;title\x07text", "text"),
        (b"bad \xff\xfe utf-8 \x00\x07", "bad \ufffd\ufffd utf-8 "),
        (b"\x1b", ""),
    ],
)
def test_escapes_and_control_bytes_go(raw: bytes, text: str) -> None:
    assert lines.clean(raw) == text


@pytest.mark.parametrize(
    ("text", "lane", "rest", "ranks"),
    [
        ("[rank3]: Traceback", "rank3", "Traceback", (3, None)),
        ("[default1]:rank 1", "default1", "rank 1", (None, 1)),
        ("[1,12]<stderr>:oops", "rank12", "oops", (12, None)),
        ("[trainer0]: x", "trainer0", " x", (None, 0)),
        ("[default0]: iteration        1/", "default0", " iteration        1/", (None, 0)),
        ("[lrdn0137:3]: [2025", "lrdn0137:3", " [2025", (None, 3)),
        ("[main:45]: x", "", "[main:45]: x", (None, None)),
        (" 3: x", "rank3", "x", (3, None)),
        ("12: x", "rank12", "x", (12, None)),
        (
            "(RayTrainWorker pid=364, ip=10.0.0.218) x",
            "RayTrainWorker pid=364, ip=10.0.0.218",
            "x",
            (None, None),
        ),
        ("(EngineCore_DP0 pid=948) x", "EngineCore_DP0 pid=948", "x", (None, None)),
        ("(Worker_TP1 rank=1 pid=9) x", "Worker_TP1 rank=1 pid=9", "x", (None, None)),
        ("[pod/train-3/main0] [default1]:x", "pod/train-3/main0 default1", "x", (None, 1)),
        ("[pod/train-3/main0] x", "pod/train-3/main0", "x", (None, None)),
        ("runner-llm-1  | x", "runner-llm-1/", "x", (None, None)),
        ("runner_llm_1  | x", "runner_llm_1/", "x", (None, None)),
        ("0 | layer_1 | Linear", "", "0 | layer_1 | Linear", (None, None)),
        ("train | epoch 001 | loss 3", "", "train | epoch 001 | loss 3", (None, None)),
        ("retraining/0 [default1]:x", "retraining/0 default1", "x", (None, 1)),
        ("ray/0 (CommandActor pid=494377) x", "ray/0 CommandActor pid=494377", "x", (None, None)),
        ("step/100 [00:01<00:09]", "", "step/100 [00:01<00:09]", (None, None)),
        ("[INFO]: x", "", "[INFO]: x", (None, None)),
        ("plain", "", "plain", (None, None)),
    ],
)
def test_prefixes_of_launchers(
    text: str, lane: str, rest: str, ranks: tuple[int | None, int | None]
) -> None:
    assert lines.split_line(text, stamped=False) == (lane, None, rest)
    assert lines.lane_rank(lane) == ranks


def test_a_lane_is_its_process_whatever_name_that_takes() -> None:
    assert lines.lane_process("Worker pid=400") == lines.lane_process("Worker_TP0 pid=400")
    nodes = {lines.lane_process(f"RayTrainWorker pid=7, ip=10.0.0.{n}") for n in (1, 2)}
    assert len(nodes) == 2
    assert lines.lane_process("rank3") == "rank3"


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-21T10:00:00.123456789Z [default0]: x",
        "[pod/a/b] 2026-11-21T12:00:00.123456789+02:00 [default0]: x",
        "trainer  | 2026-11-21T10:00:00.123456789Z [default0]: x",
        "2026-11-21T10:00:00.123456789Z stderr F [default0]: x",
        "[2026-11-21T10:00:00.123456Z] [default0]: x",
        "2026-11-21 10:00:00.123456+0000 [default0]: x",
        "2026-11-21T19:00:00,123456+09:00 [default0]: x",
    ],
)
def test_the_times_of_container_logs(text: str) -> None:
    lane, stamp_ns, rest = lines.split_line(text)
    assert (lane.split()[-1], rest) == ("default0", " x")
    assert stamp_ns == 1795255200_123456000
    assert lines.split_line(text[:8] + text)[1] is None


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("123ms", 123_000_000),
        ("1.08s", 1_080_000_000),
        ("1m 02s", 62 * 10**9),
        ("1h2m3.5s", 3723_500_000_000),
        ("357.117972ms", 357_117_972),
        ("4µs", 4000),
        ("soon", None),
        pytest.param("9" * 400 + "s", None, id="hundreds of digits"),
    ],
)
def test_durations(text: str, ns: int | None) -> None:
    assert lines.parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    ("text", "time_format", "iso"),
    [
        ("2026-11-21T19:10:17,108", "iso", "2026-11-21T19:10:17.108+00:00"),
        ("2026-11-21T19:10:17.123456789Z", "iso", "2026-11-21T19:10:17.123456+00:00"),
        ("2026-11-21T20:10:17+01:00", "iso", "2026-11-21T19:10:17+00:00"),
        ("1795288217.25", "unix", "2026-11-21T19:10:17.25+00:00"),
        ("1795288217250", "unix_ms", "2026-11-21T19:10:17.25+00:00"),
        ("1121 18:58:49.667000", "%m%d %H:%M:%S.%f", "2026-11-21T18:58:49.667+00:00"),
        ("1231 23:59:59.000000", "%m%d %H:%M:%S.%f", "2026-12-31T23:59:59+00:00"),
        ("0101 00:00:01.000000", "%m%d %H:%M:%S.%f", "2027-01-01T00:00:01+00:00"),
        ("23:59:59", "%H:%M:%S", "2026-11-21T23:59:59+00:00"),
        ("01:00:00", "%H:%M:%S", "2026-11-22T01:00:00+00:00"),
        ("Thu Jan  4 10:00:00 2024", "%c", "2024-01-04T10:00:00+00:00"),
        ("01/04/24 10:00", "%x %H:%M", "2024-01-04T10:00:00+00:00"),
    ],
)
def test_timestamps_are_read_and_completed(text: str, time_format: str, iso: str) -> None:
    expected = datetime.datetime.fromisoformat(iso)
    got = lines.parse_time_ns(text, time_format, 0, NEAR_NS)
    assert got is not None
    assert got / 1e9 == pytest.approx(expected.timestamp(), abs=1e-5)


def test_a_day_without_a_year_lies_before_the_time_after_which_nothing_was_written() -> None:
    """A log of February, copied in November."""
    form, latest_ns = "%m-%d %H:%M:%S", NEAR_NS + 86400 * 10**9
    got = lines.parse_time_ns("02-07 19:23:56", form, 0, NEAR_NS, latest_ns)
    expected = datetime.datetime.fromisoformat("2026-02-07T19:23:56+00:00")
    assert got == int(expected.timestamp()) * 10**9
    leap = lines.parse_time_ns("02-29 10:00:00", form, 0, 1_830_000_000 * 10**9, 0)
    assert (
        leap == int(datetime.datetime.fromisoformat("2028-02-29T10:00+00:00").timestamp()) * 10**9
    )


@pytest.mark.parametrize("text", ["9" * 30, "-5", "9" * 5000])
def test_a_number_that_is_no_time_of_this_century_is_none(text: str) -> None:
    assert lines.parse_time_ns(text, "unix_ms", 0, NEAR_NS) is None


def test_zone_offset_applies_to_times_without_zone() -> None:
    utc = lines.parse_time_ns("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S", 0, 0)
    ahead = lines.parse_time_ns("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S", 3600, 0)
    assert utc is not None
    assert ahead == utc - 3600 * 10**9


@pytest.mark.parametrize("time_format", ["iso", "unix", "%m%d", "%H:%M", "%Y-%m-%d"])
@given(text=st.text(max_size=20))
def test_a_foreign_timestamp_is_none_and_never_an_error(time_format: str, text: str) -> None:
    got = lines.parse_time_ns(text, time_format, None, NEAR_NS)
    assert got is None or isinstance(got, int)
