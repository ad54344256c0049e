"""Memory: so far the host allocator."""
