"""Commands that only look: what a model is, what differs, what is supported; and the way back."""
