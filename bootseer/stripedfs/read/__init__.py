"""Finding checkpoints and reading them."""
