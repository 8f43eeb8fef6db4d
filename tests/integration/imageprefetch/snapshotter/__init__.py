"""The snapshotter under containerd and kubelet."""
