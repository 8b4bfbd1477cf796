"""Attention heads: importance, ablation, and how many can be pruned."""
