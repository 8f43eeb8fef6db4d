"""Benchmarks: `python -m bench NAME [CASE…] [--quick] [--runs N]`, side by side in one run.

A bench is `NAME.py`, or `NAME/benchmark.py` with what belongs to it beside it. What they share
stands here: `harness` (rounds, ratios, result files), `floors` (what the figures must reach),
`names`, `revisions` (which figures are stale), `cores`, `memory`, and `paced_server`, a store.
"""
