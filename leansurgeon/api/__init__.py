"""leansurgeon from Python. What is exported stands in `leansurgeon/__init__.py`, and is named as on the command line.

    cutting    plan, shrink
    training   retrain, heal
    looking    kappa, heads, report, search, load

Nothing here imports torch at module level.
"""
