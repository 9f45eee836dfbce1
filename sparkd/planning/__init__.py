"""What serving a model will take and how fast it will be, worked out from its header alone."""
