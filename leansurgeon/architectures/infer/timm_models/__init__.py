"""Families of timm that nobody has declared, by the arguments of their constructors.

What keys of a `config.json` are to transformers, the arguments that a model's entry point gives its class are to timm:
`timm.create_model(name, depth=9, num_heads=16)` overrides them one by one, and so does `model_args` in a folder. They
are read off while the model is built; lists are spoken of entry by entry (`depths.2`). Everything else is the same
inference.
"""
