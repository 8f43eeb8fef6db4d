"""Bench `depsnap`: restored environments, and whole `deps run` commands, against pip and uv."""
