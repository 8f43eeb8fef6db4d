"""The tree of a mount, called without a kernel."""
