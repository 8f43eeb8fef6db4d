"""Documents, the rules of the house, and the repository's own tools and laboratories."""
