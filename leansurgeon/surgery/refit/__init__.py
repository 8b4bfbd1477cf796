"""The repair behind a cut: least squares and short fits of a block, or of a span, to what the original computes."""
