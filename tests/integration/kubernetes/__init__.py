"""Injected pods on a real Kubernetes. `make k8s-test` has these as well."""
