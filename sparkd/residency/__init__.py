"""Which record lives in which slot of which tier; pure, imports nothing of the project."""
