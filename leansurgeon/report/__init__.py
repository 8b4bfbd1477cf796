"""Collect runs and models, compare them, and print what can honestly be concluded. No torch: it reads what trainings
wrote.

`collect` finds folders and `runs` reads them into typed values, `rows` and `sections` group them by experiment and arm,
`verdict` and `notes` state what the seeds and the size of the test set allow, `tables` prints, `charts` draws, and
`page` writes everything to one HTML file. A new measurement of a run goes to `runs.py`, a new column to
`tables/columns.py`, a new chart to `charts/`.
"""
