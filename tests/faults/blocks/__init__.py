"""The fetcher and the node cache under kills, bad stores and full disks."""
