"""A model one block at a time: a skeleton that is filled and emptied, and the states that walk through it."""
