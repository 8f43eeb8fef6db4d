"""Images on a node."""
