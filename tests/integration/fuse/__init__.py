"""Our FUSE server in real mounts."""
