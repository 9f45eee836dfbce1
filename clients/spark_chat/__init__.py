"""A terminal chat: knows the client socket and nothing else of the daemon."""
