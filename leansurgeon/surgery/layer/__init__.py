"""The mathematics of one layer, on tensors alone: split, trim, balance."""
