"""The parts of surgery.json as typed values, and how they are read from and written to the file."""
