"""`bootseer image files`."""
