"""Model files: bounded GGUF reader, quantisation types, split sets."""
