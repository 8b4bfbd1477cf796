"""Charts made with altair (Vega-Lite): one specification for the page, in light and dark, and for SVG, PNG and PDF
files.

`forms` makes specifications from numbers, `sections` chooses the numbers, `render` makes the pictures.
These modules import altair, so code that may print only a table imports them on use.
"""
