"""A real containerd of a test's own, and containerd's own test suite for snapshotters."""
