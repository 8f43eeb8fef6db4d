"""`bootseer image`."""
