"""Gradients of which only the large entries travel over a slow level, with error feedback on both sides."""
