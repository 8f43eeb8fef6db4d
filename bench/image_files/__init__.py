"""Bench `image_files`: container starts with file mode, and without."""
