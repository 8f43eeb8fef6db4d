"""What events tell of a start, and how it is shown."""
