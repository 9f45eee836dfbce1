"""The program a model is described by; pure, imports nothing of the project."""
