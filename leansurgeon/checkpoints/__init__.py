"""Open a SOURCE, read its tensors lazily, write complete model folders, and verify them by reloading."""
