"""Kernels, one file a backend. Each computes what ``reference.py`` defines."""
