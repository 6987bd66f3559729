"""All mutants, in order of level."""

from . import level_0, level_1, level_2, level_3, level_4, level_5

MUTANTS = tuple(m for level in (level_0, level_1, level_2, level_3, level_4, level_5) for m in level.MUTANTS)
