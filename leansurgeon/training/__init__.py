"""Training: recipes, the training loop, data order, and multi-process training.

Importing this package does not import torch. `loop.train` trains one model; `together.train_on` trains on several
processes; `recipe.reading.load` reads the recipes that both take.
"""
