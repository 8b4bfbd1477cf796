"""Where files of others are read: one reader with limits for each form. A foreign file is an attack until read.

Every reader raises `UsageError` (those of pickles and cards the kind that they name) and nothing else: whatever stands
in a file, there is one sentence, after bounded time and memory. A caller that owes the user another kind says
`raised_as`. No torch here at module level.
"""
