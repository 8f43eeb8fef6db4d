"""Mounts that are gone afterwards for certain."""
