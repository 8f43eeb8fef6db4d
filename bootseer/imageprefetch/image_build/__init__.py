"""From a stock image, wherever it lies, to its block image."""
