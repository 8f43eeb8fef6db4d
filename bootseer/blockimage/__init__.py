"""A file tree as one mountable image: EROFS metadata, data in a block table, hot pages."""
