"""Infer undeclared families of timm from the arguments of their constructors.

In timm, the arguments that a model's entry point passes to its class play the role of config keys:
`timm.create_model(name, depth=9, num_heads=16)` overrides them one by one, and so does `model_args` in a folder. They
are recorded while the model is built; entries of lists are addressed singly (`depths.2`). Everything else works as for
transformers.
"""
