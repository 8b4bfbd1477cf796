"""Modules that neither transformers nor timm can express.

A file for transformers stands alone, because a copy of it travels inside checkpoints: what several of them need is
repeated in each, on purpose. Files for timm never travel; what they share is in `timm_parts.py`.

Families that are twins in transformers (BERT and RoBERTa, BART and mBART) share one file.

A modelling file ends with `AUTO_MAP`, the classes of config.json's auto_map without the file name (by model_type if the
file holds several families).
"""
