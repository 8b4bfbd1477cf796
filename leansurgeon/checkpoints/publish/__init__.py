"""Publish results under their name: complete or not at all, and never over something else."""
