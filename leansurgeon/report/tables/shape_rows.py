"""Lines that tables of a shape and its parameters have: how they are called, and what they show."""

SHAPE = (
    ("layers", "depth"),
    ("heads", "heads"),
    ("head_dim", "head_dim"),
    ("key/value heads", "kv_heads"),
    ("inner width", "inner"),
    ("MLP", "mlp_dim"),
    ("width", "width"),
)
PARAMETERS = (("embeddings",) * 2, ("attention",) * 2, ("MLP", "mlp"), ("rest",) * 2, ("all", "total"))
