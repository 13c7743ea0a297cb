"""A real Kubernetes on a bare machine: built from source once, run inside network namespaces of its own."""
