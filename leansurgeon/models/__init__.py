"""Modules that neither transformers nor timm can express. A file for transformers stands alone, since a copy of it
travels inside checkpoints: what several of them need is written out in each, on purpose. Files for timm never travel;
what they share is in `timm_parts.py`.

A modelling file ends with `AUTO_MAP`, the classes of `config.json`'s auto_map without the file name.
"""
