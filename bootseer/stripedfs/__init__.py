"""Checkpoints striped over many objects, and the faces through which programs read them."""
