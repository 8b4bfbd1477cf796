"""Where files of others are read: one reader with limits for each form. A foreign file is an attack until read.

Every reader takes `raising`, the kind of error that its caller owes the user (a model that cannot be read is another
exit code than a recipe), and raises nothing else: whatever stands in a file, there is one sentence, after bounded time
and memory. No torch here at module level.
"""
