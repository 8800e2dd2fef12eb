"""What the simulator reports: outcomes as numbers, as pictures, and as a page.

intervals.py   confidence intervals of means and of paired differences
summary.py     outcomes of several seeds as one line for each policy: the JSON contract
series.py      rates and accumulated FLOP over time
plots.py       pictures (matplotlib, the extra ``plots``)
page.py        one self-contained HTML page
"""
