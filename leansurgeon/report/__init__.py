"""Collect runs and models, compare them, and print what can honestly be said. No torch: it reads what training left.

`collect` finds folders and `runs` reads them into typed values, `rows` and `sections` group them by experiment and arm,
`verdict` and `notes` say what the seeds and the size of the test set allow, `tables` prints, `charts` draws, and `page`
puts all of it into one HTML file. A new figure of a run goes to `runs.py`, a new column to `tables/columns.py`, a new
chart to `charts/`.
"""
