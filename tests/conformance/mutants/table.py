"""All mutants: those of the levels, then those of rounding, of size, of state and of options."""

from . import level_0, level_1, level_2, level_3, level_4, level_5, options, precision, sizes, state

_TABLES = (level_0, level_1, level_2, level_3, level_4, level_5, options, precision, sizes, state)
MUTANTS = tuple(m for table in _TABLES for m in table.MUTANTS)
