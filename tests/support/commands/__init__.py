"""Our commands and other programs, run for real."""
