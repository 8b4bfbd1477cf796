"""The processes of one training: how they start, what they agree on, how signals end them."""
