"""Writing checkpoints, replacing and removing them."""
