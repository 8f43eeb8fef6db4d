"""The format of striped checkpoints, and the file object."""
