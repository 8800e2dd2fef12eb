"""The loops of the exact solver, on flat arrays. ``compiled.py`` compiles these very functions with numba.

Written in the subset that numba compiles: integers, floats, numpy arrays and tuples of them, no other objects. The
algorithm is told in ``solver.py``. Worths are fixed-point numbers (int64), so sums are exact and no order of adding
matters. All stay below 2**62: the worths of one assignment add up to less than 2**58, and what all workers cost at the
price of the relaxation to less than 2**60.
"""
