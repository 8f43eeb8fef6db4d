"""File mode: what is recorded of a command, and its replay."""
