"""Teachers: clients for the servers that score (pool, adapters) and a small server of our own."""
