"""Recipes: their settings, how they are read from files and flags, and recipes made for a user's data or model."""
