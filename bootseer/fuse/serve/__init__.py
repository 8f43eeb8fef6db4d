"""Serving operations at a mount point: threads, dispatch, and servers that are replaced."""
