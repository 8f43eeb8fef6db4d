"""The archive of a snapshot: its layout, its writer, its index and their checks."""
