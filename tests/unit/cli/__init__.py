"""Command lines as they are read, and what commands show."""
