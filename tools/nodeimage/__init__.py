"""The image that brings the snapshotter onto the nodes of a cluster."""
