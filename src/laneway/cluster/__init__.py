"""Levels of the network: topology, cost model and planner (no torch), and what runs on them."""
