"""The commands: one file each, with its request, its result and `COMMAND`, from which the command line and the Python
API are built. Nothing here imports torch at module level.
"""

# By panel, as in `leansurgeon --help`: the most important first.
PANELS = {
    "Cut, train, compare": {
        "shrink": "Rewrite a model to more heads and fewer layers, and prove the result.",
        "retrain": "Train a model by a recipe, or heal it on your data.",
        "report": "Compare runs: metric, parameters, memory, time, conditioning.",
        "run": "Train original, lean variants and controls, and compare them.",
        "search": "Find the best heads, layers and MLP under a budget.",
    },
    "Measure": {
        "plan": "Parameters, operations and memory before and after a cut.",
        "judge": "Compare a model with its source on your own data.",
        "kappa": "Condition numbers of the attention blocks.",
        "heads": "Importance of every head, and pruning.",
        "bench": "Time and memory on this machine.",
    },
    "Look": {
        "inspect": "Shape, parameters, origin and known traps of a model.",
        "diff": "Two models side by side.",
        "undo": "Take exact changes back, bit for bit.",
        "families": "What may change in which model type.",
    },
    "Reproduce": {
        "paper": "The paper's tables beside our counts.",
        "recipes": "The recipes that come with leansurgeon.",
    },
}
