"""Started by tests as processes of their own, by path, or as tasks of a fork server."""
