"""Charts by altair (Vega-Lite): one specification for the page, in light and dark, and for SVG, PNG and PDF files.

`forms` makes specifications from numbers, `sections` and `heads` say which numbers are drawn, `render` makes pictures.
These import altair, so whoever may also print a table imports them on use.
"""
