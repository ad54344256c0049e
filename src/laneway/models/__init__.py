"""Models as plain single-device code; parallelism and memory management are applied from outside."""
