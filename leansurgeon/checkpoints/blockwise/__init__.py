"""Run a model one block at a time: a skeleton that is filled and emptied, and the hidden states between blocks."""
