"""OCI registries and image layouts: manifests, blobs by range, referrers, pushing."""
