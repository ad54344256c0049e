"""Draws finished or running runs as one self-contained HTML file. Reads run directories only; the loop never calls it.

runs.py     a run's files, curves and final figures      series.py   smoothing, thinning
figures.py  which pictures                               scale.py    axes and ticks
tables.py   which tables                                 chart.py, heatmap.py, lives.py, svg.py, palette.py   drawing
memory.py, memory_figures.py   what the memory manager did
page.py     the page itself, from templates/
"""

from laneway.report.page import render, write_report
from laneway.report.runs import Run, load_runs

__all__ = ["Run", "load_runs", "render", "write_report"]
