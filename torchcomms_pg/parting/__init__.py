"""Where the ranks of a group have taken different ways, and why.

A verdict asks two ranks: one that others wait for, and one of those that wait. `positions` has what
they tell of themselves, `flow` the ways through a function, `compare` the decision that separates
the two, `statement` the source, `values` what can be read of the program's objects without running
its code, and `inquiry` puts these together.
"""
