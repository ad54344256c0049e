"""Plans that join the three wings: auto_config chooses, Strategy.wrap_model applies."""
