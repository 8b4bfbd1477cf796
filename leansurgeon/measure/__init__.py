"""Measurements of models: costs, conditioning, heads, and the data that they are taken on."""
