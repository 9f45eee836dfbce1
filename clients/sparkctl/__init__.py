"""Command line for a running daemon and for model files."""
