"""What crosses process borders: messages, sockets, shared memory, the expert directory."""
