"""What a training step is given: which samples in which order, fed ahead of time; made up where only speed counts."""
