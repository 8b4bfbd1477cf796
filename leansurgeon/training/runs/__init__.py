"""What a training leaves and goes on from: the run folder, checkpoints, the summary, the data that it names."""
