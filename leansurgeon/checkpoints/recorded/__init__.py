"""The parts of surgery.json as values: what was planned and decided, and how their files' values are taken."""
