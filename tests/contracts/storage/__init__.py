"""What every store and every repository of images does."""
