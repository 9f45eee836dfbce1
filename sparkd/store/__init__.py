"""The host-memory daemon: fills and owns the arena."""
