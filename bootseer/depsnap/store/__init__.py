"""Snapshots in a store: records, archives, publication, collection."""
