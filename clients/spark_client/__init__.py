"""Client of the sparkd socket: depends on pyzmq and msgpack alone."""
