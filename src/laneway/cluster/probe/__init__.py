"""The network while it is used: what is slow, where, and what to do about it."""
