"""leansurgeon from Python. What is exported stands in `leansurgeon/__init__.py`, and is named as on the command line.

    surface    what every function shares: whose code may run, who hears of progress, errors in Python's words
    given      models and data in memory as the folders and files that the commands take
    results    what comes back: prints as the command prints, `as_dict()` is what --json prints
    cutting    plan, shrink
    training   retrain, heal
    looking    kappa, heads, diff, report, search, load

Nothing here imports torch at module level.
"""
