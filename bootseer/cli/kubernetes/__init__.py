"""`bootseer inject`, `uninject` and `k8s`."""
