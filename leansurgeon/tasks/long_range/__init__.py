"""The Long Range Arena, and D-retrieval, whose data is generated."""
