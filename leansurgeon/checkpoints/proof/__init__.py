"""The proof of a result: reload it in a fresh process, compare it with its source, say it in a sentence."""
