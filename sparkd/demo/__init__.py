"""The built-in model and the tour that `sparkd demo` gives with it."""
