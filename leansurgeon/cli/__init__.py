"""One module per command: parse, call, print. Nothing here imports torch at module level."""
