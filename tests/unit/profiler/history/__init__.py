"""The history of many starts."""
