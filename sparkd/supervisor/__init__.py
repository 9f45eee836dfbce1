"""Starts and watches the other processes, owns the client socket."""
