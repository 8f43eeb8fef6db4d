"""A file tree as one mountable image: EROFS metadata, data in a block table, a pack of hot pages."""
