"""The whole start of a container on this node: its image, and what its job needs besides."""
