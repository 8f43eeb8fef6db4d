"""Rules that keep mounted images right, and what their servers report."""
