"""Tables of results, plans and measurements."""
