"""The fetcher: decides what to fetch next, fetches it, and hands it to its readers."""
