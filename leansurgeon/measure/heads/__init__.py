"""Heads: how important each is, what the model is without it, and how many could go."""
