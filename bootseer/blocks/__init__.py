"""Ranges of immutable, checksummed objects: fetched, cached, recorded and replayed."""
