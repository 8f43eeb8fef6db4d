"""`bootseer deps`."""
