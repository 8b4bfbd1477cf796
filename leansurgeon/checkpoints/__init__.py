"""Checkpoints: open a SOURCE, read tensors lazily, write folders that are whole or absent, and prove them by
reloading.
"""
