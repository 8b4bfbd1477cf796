"""Modules that neither transformers nor timm can express. Each file stands alone, since a copy of it travels inside
checkpoints: what several of them need is written out in each, on purpose.

A modelling file ends with `AUTO_MAP`, the classes of `config.json`'s auto_map without the file name.
"""
