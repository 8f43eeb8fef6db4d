"""The kernel's FUSE protocol: one `Operations` interface and the servers for it."""
