"""The compiled CPU kernels: C++ sources, what builds and loads them, and the backend that calls them."""
