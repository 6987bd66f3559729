"""All mutants: those of the levels, then those of rounding, of size and of state."""

from . import level_0, level_1, level_2, level_3, level_4, level_5, precision, sizes, state

_TABLES = (level_0, level_1, level_2, level_3, level_4, level_5, precision, sizes, state)
MUTANTS = tuple(m for table in _TABLES for m in table.MUTANTS)
