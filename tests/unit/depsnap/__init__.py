"""The archive of a dependency snapshot, and what is captured for it."""
