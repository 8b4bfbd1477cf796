"""What a measurement runs on: files, tasks, words and noise, in batches that the model takes."""
