"""Parts of the snapshotter that need no containerd."""
