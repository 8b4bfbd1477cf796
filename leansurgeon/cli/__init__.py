"""The command line: options, help and completion. Nothing here imports torch at module level."""
