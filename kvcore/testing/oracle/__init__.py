"""Expected values, from formulas alone: attention, rounding, tolerances, and the address of every byte."""
