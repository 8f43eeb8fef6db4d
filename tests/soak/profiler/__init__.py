"""The report against the truth of generated starts."""
