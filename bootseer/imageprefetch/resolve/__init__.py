"""From an image's name to what a mount needs, in few round trips."""
