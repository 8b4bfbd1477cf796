"""What a training writes and resumes from: the run folder, checkpoints, the summary."""
