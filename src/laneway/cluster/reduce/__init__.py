"""Reductions and gathers over the levels of a network, on real process groups."""
