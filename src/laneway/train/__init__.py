"""Training: a typed configuration, one loop, and small parts around it. The loop takes part in nothing but PyTorch's own engines.

Read in this order: ``config`` (every dial), ``loop`` (the order of things), ``step`` (forward, backward, update), then the rest.
"""
