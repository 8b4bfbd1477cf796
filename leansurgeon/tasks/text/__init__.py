"""Text tasks: language models, classification, pairs, GLUE and sentences."""
