"""Snapshots in a store: records, archives, publication, garbage collection."""
