"""Benchmarks: `python -m bench NAME [--quick] [--runs N]`, side by side in one run."""
