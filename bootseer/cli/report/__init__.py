"""`bootseer report`, `history` and `import`."""
