"""How results come to stand at their name: whole or not at all, and never in the place of something else."""
