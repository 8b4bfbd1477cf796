"""Verify a result: reload it in a fresh process, compare it with its source, and report it in a sentence."""
