"""Event files as they are read."""
