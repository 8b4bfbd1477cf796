"""Operations, memory and speed: counted, predicted for GPUs, timed on this machine."""
