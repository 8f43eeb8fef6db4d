"""A striped checkpoint's documents, and where its bytes lie."""
