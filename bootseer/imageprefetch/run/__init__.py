"""`image run`: a container over a mounted image."""
