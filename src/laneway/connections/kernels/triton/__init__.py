"""Triton kernels of a site, for CUDA and ROCm GPUs. Nothing here is imported until a site runs on one.

backend.py says what is launched; streams.py and gradient.py go over the streams, maps.py and sinkhorn.py over the maps, sums.py
reduces. See docs/triton.md for what each kernel reads and writes.
"""

LARGEST = 8  # streams: n² registers for the matrix alone
