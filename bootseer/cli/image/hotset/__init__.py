"""`bootseer image hotset`."""
