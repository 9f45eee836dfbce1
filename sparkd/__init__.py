"""sparkd: serves big Mixture-of-Experts GGUF models from host memory, with one arithmetic everywhere."""

__version__ = "0.1.0"
