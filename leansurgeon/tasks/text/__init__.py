"""Tasks on text: language models, classification, pairs, GLUE and sentences."""
