"""Charts by altair (Vega-Lite): one specification for the page, in light and dark, and for SVG, PNG and PDF files.

`forms` makes specifications from numbers, `sections` and `anatomy` say which numbers are drawn, `render` makes the
pictures.
These import altair, so whoever may also print a table imports them on use.
"""
