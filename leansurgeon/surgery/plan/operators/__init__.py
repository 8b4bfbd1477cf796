"""One file each: what may be done to a model, what it promises and what it needs; `order` strings them together."""
