"""The Long Range Arena and D-retrieval, which make their own data."""
