"""Hot sets carried to another version, and their traces."""
