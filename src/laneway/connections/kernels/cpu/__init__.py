"""The compiled CPU kernels: C++ sources, what builds and loads them, and the backend that calls them."""

LARGEST = 16  # streams; as in sinkhorn.h
