"""Handle what others wrote: companion files of a model, foreign code, published layouts, bare weights."""
