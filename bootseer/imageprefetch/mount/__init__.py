"""`image mount`: the process that serves an image, and what is known of those that run."""
