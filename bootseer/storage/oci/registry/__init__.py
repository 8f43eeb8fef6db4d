"""How a registry is spoken to: logins, mirrors, blobs by range, uploads."""
