"""What several commands share: options, sizes, progress, error messages, lazy groups."""
