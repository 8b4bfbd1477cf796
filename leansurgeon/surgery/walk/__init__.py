"""The calibrated walk, block by block: candidates are made, judged by what follows, and kept or not."""
