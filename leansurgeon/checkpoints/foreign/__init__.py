"""What comes from strangers: companions of a model, foreign code, published layouts, bare weights."""
