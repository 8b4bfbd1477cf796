"""How the page looks: one style sheet for screen, phone and print, light and dark. Fonts are those of the system."""

from __future__ import annotations

# name -> (light, dark). Text has 4.5 : 1 against both backgrounds at least, lines of a chart 3 : 1 (WCAG 2.2).
COLOURS = {
    "ground": ("#ffffff", "#14171c"),
    "raised": ("#f4f5f7", "#1e232b"),
    "text": ("#1b1f24", "#e7eaee"),
    "quiet": ("#57606a", "#a3acb8"),
    "line": ("#d0d5dc", "#3a424e"),
    "link": ("#0a58b0", "#7db8f5"),
    "warn": ("#93380c", "#ffab7d"),
    "c0": ("#0b62b0", "#6db3f2"),
    "c1": ("#b5440c", "#ff9a6b"),
    "c2": ("#067355", "#4fcfa5"),
    "c3": ("#8b3f97", "#d69ae0"),
    "c4": ("#7a5d00", "#e3bb54"),
    "c5": ("#4a5560", "#c4ccd6"),
}
SERIES = 6  # c0 to c5; further series begin again, with other dashes


def variables(index: int) -> str:
    return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())


def series(i: int) -> str:
    return f".s{i}{{stroke:var(--c{i});color:var(--c{i})}}.f{i}{{fill:var(--c{i})}}"


STYLE = (
    f":root{{color-scheme:light dark;{variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
    f"@media print{{:root{{color-scheme:light;{variables(0)}}}}}"
    + "".join(map(series, range(SERIES)))
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1rem;max-width:74rem;background:var(--ground);color:var(--text);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.3rem;line-height:1.25;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:3px solid var(--line)}
h3{font-size:1.05rem;margin:2rem 0 .5rem}
h4{font-size:1rem;margin:1.25rem 0 .25rem}
p,ul{margin:.5rem 0;max-width:48rem}
ul{padding-left:1.2rem}
a{color:var(--link)}
.quiet,caption,figcaption,.foot{color:var(--quiet);font-size:.875rem}
.warn{color:var(--warn);font-weight:600}
.lead{font-size:1.05rem}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.scroll{overflow-x:auto;margin:.75rem 0;position:relative}
.scroll:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;overflow-wrap:normal;font-variant-numeric:tabular-nums;font-size:.9rem}
caption{text-align:left;padding:.25rem 0;caption-side:top}
th,td{padding:.3rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}
thead th{vertical-align:bottom;font-weight:600;color:var(--quiet);border-bottom:2px solid var(--line)}
th:first-child{text-align:left;padding-left:0}
td,thead th:first-child{white-space:nowrap}
tbody th{font-weight:600;overflow-wrap:normal}
.left td{text-align:left;white-space:normal}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem 1.5rem;margin:1rem 0}
figure{margin:0;max-width:34rem;break-inside:avoid}
figcaption{margin:.25rem 0}
figcaption b{color:var(--text);display:block;font-size:.95rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--text);font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
svg .tick{fill:var(--quiet)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .plot{fill:none;stroke-width:2;stroke-linejoin:round}
svg .mark{stroke-width:1.5}
svg .hollow{fill:var(--ground)}
svg .cell{fill:var(--c0);stroke:var(--line);stroke-width:.5}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;list-style:none;padding:0;margin:.25rem 0}
.legend svg{display:inline-block;width:28px;height:12px;vertical-align:middle;margin-right:.3rem}
pre{background:var(--raised);padding:.6rem .8rem;border-radius:4px;white-space:pre-wrap;font-size:.82rem;
 line-height:1.4}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.5rem 0;max-width:60rem;font-size:.9rem}
dt{color:var(--quiet)}dd{margin:0}
.foot{border-top:1px solid var(--line);margin-top:3rem;padding-top:.5rem}
@media screen and (max-width:40rem){
 .cards,.cards tbody,.cards tr{display:block;width:100%}
 .cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
 .cards tr{border:1px solid var(--line);border-radius:6px;padding:.4rem .7rem;margin:.6rem 0}
 .cards caption{display:block}
 .cards th[scope=row]{display:block;border:0;padding:.1rem 0;font-size:1rem}
 .cards tr{display:grid;grid-template-columns:1fr 1fr;gap:.15rem .8rem}
 .cards th[scope=row]{grid-column:1/-1}
 .cards td{display:block;text-align:left;border:0;padding:.1rem 0;white-space:normal}
 .cards td::before{content:attr(data-label);display:block;color:var(--quiet);font-size:.8rem;line-height:1.2}
 .scroll:not(:has(.cards)) caption{max-width:calc(100vw - 2rem)}
 .scroll:not(:has(.cards)) th:first-child{position:sticky;left:0;background:var(--ground);padding-right:.7rem}
 dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}
}
@media print{
 @page{margin:14mm}
 body{max-width:none;padding:0;font-size:10pt}
 main>section+section{break-before:page}
 h2,h3,h4,caption{break-after:avoid}
 tr,li{break-inside:avoid}caption{white-space:nowrap}
 .scroll{overflow:visible}
 table{font-size:8pt}th,td{padding:.2rem .35rem}
 .charts{grid-template-columns:1fr 1fr}
 nav{display:none}
 *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""
)
