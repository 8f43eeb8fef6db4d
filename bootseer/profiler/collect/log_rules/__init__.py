"""Rules that turn log lines of unmodified programs into phases."""
