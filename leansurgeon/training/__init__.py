"""Training: the recipe schema, the loop, the order of data, and doing it on several processes.

Importing this room costs no torch. `loop.train` trains one model; `together.train_on` does so on several processes;
`recipe.reading.load` reads the recipes that both speak of.
"""
