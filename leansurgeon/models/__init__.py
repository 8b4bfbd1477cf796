"""Modules that neither transformers nor timm can express. A file for transformers stands alone, since a copy of it
travels inside checkpoints: what several of them need is written out in each, on purpose. Files for timm never travel;
what they share is in `timm_parts.py`.

Families that are twins in transformers (BERT and RoBERTa, BART and mBART) have one file, made of one text.

A modelling file ends with `AUTO_MAP`, the classes of `config.json`'s auto_map without the file name (by model_type
where the file holds several families).
"""
