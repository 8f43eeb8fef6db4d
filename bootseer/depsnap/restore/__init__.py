"""From an archive to a target: staging, workers, the journalled switch."""
