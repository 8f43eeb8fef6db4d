"""The peer of `bench report`: duckdb pairs the same begins and ends and takes the same percentiles.

    python -m bench.report.duckdb_peer EVENTS

Reads what the report reads, as JSON of lines with the fields named that it needs, and prints each
phase's number of processes, median, 90th and 99th percentile and maximum in seconds. It corrects no
clock, and finds no barrier, straggler or cause.
"""

from __future__ import annotations

import sys

import duckdb

QUERY = """
WITH events AS (
  SELECT event, span_id, name, mono_nano
  FROM read_json(?, format = 'newline_delimited', ignore_errors = true, columns = {
    event: 'VARCHAR', span_id: 'VARCHAR', name: 'VARCHAR', mono_nano: 'BIGINT'})
), spans AS (
  SELECT begun.name, (ended.mono_nano - begun.mono_nano) / 1e9 AS seconds
  FROM (FROM events WHERE event = 'begin') begun
  JOIN (FROM events WHERE event = 'end') ended USING (span_id)
)
SELECT name, count(*), quantile_cont(seconds, [0.5, 0.9, 0.99]), max(seconds)
FROM spans GROUP BY name ORDER BY name
"""


def main() -> int:
    """Run from the command line."""
    for row in duckdb.connect().execute(QUERY, [f"{sys.argv[1]}/*.jsonl"]).fetchall():
        print(*row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
