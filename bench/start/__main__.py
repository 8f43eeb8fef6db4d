"""`python -m bench.start CASE ...`: some of the cases."""

from bench import memory
from bench.start import benchmark

if __name__ == "__main__":
    with memory.kept():
        raise SystemExit(benchmark.main())
