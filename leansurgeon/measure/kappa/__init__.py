"""Condition numbers of attention blocks, beside what a change of basis cannot move."""
