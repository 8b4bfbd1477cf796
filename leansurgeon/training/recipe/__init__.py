"""The recipe: its settings, how a file and flags become it, and recipes that follow from data or from a model."""
