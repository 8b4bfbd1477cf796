"""Sample data to measure on: files, tasks, text and noise, in batches that the model takes."""
