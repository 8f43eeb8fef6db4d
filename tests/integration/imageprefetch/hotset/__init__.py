"""Hot sets packed, published, chosen and pruned."""
