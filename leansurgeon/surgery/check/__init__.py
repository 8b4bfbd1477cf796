"""Checks: the doctor applies every operator to a family; results are judged beside their source."""
