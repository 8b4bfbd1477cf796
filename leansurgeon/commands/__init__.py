"""What the commands do, without a terminal: typed values in, typed values out, talk to whoever is given.

The command line (`cli`) parses and prints around these; Python (`leansurgeon.shrink`, ...; `api`) calls the same.
"""
