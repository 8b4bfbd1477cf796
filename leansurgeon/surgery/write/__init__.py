"""A plan carried out on tensors, written as a result; and the way back."""
