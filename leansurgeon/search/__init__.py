"""The best (heads, layers, MLP) of a source under a budget; `outcome.search` is the way in.

Nothing is imported here: the package gives the name `leansurgeon.search` to a function of Python's, once this room has
been loaded (see `leansurgeon/__init__.py`).
"""
