"""What both FUSE servers answer."""
