"""containerd's own suite for snapshotters."""
