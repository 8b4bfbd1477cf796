"""Measurements of models: costs, conditioning, heads, and the data they are taken on."""
