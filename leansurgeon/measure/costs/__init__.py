"""Operations, memory and speed: counted, predicted for GPUs, clocked on this machine."""
