"""Charts by altair (Vega-Lite): one specification for the page, in light and dark, and for SVG, PNG and PDF files.

`forms` makes specifications from numbers, `sections` and `heads` say which numbers are drawn, `render` makes pictures.
altair is imported on use, so that a table in the terminal does not wait for it.
"""
