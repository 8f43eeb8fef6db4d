"""Bench `image`: container starts on mounted images against pulls, stargz and the disk."""
