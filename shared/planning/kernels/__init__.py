"""The loops of the exact solver, on flat arrays. ``compiled.py`` compiles these functions with numba.

The modules use only what numba compiles: integers, floats, numpy arrays and named tuples of them. ``solver.py``
describes the algorithm. Objective values are fixed-point numbers (int64), so sums are exact and do not depend on the
order of addition. All numbers stay below 2**62: the values of one assignment add up to less than 2**58, and all
workers at the price of the relaxation cost less than 2**60.
"""
