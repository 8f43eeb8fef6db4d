"""Serving a mounted block image: hot pages, demand reads, background fill."""
