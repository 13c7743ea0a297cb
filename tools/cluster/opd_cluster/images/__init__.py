"""Container images without a container daemon: layers are directories, built once per content and hard-linked into nodes."""
