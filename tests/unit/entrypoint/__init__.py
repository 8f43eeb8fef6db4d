"""The start that asks only for its image's files."""
