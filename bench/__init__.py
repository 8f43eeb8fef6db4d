"""Benchmarks: `python -m bench NAME [CASE…] [--quick] [--runs N]`, side by side in one run."""
