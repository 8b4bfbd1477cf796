"""Condition numbers of attention blocks, with quantities that a change of basis cannot alter."""
