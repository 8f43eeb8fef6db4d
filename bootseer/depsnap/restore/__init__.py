"""From an archive to a target: staging, workers, and a journalled switch."""
