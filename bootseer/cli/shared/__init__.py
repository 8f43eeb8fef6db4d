"""What several commands have: options, sizes, progress, errors, lazy groups."""
