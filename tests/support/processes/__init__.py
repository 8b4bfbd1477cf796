"""Processes of tests that cost no import."""
