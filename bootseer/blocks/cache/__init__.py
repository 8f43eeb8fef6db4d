"""The node cache: verified blocks on disk, shared by all processes of a node."""
