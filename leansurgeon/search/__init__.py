"""Search for the best (heads, layers, MLP) of a source under a budget; the entry point is `outcome.search`.

Nothing is imported here: once this package has been loaded, `leansurgeon.search` must still be the Python function (see
`leansurgeon/__init__.py`).
"""
