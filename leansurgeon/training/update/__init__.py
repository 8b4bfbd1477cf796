"""One update of the weights: loss, optimizer, schedule, averages; and how a recipe changes the model before."""
