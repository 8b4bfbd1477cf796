"""Readers for files from outside: one reader with limits for each format. A foreign file counts as an attack until
read.

Every reader raises `UsageError` (those of pickles and cards the type that they name) and nothing else: whatever a file
contains, the result is one sentence, after bounded time and memory. A caller that needs another type uses `raised_as`.
No torch here at module level.
"""
