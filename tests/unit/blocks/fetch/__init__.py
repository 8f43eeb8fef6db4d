"""The fetcher and its plans."""
