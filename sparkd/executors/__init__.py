"""Executors run a program: reference (meaning), native (CPU), and the interface they share."""
