"""Faults under one value of an option: right with the partitions that are the default."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "reads_256_of_a_partition",
        "L2",
        "of a partition of 512 keys the first 256 are read",
        "backend.py",
        "stop = min(first + self.partition, max(held, 1))",
        "stop = min(first + min(self.partition, 256), max(held, 1))",
        cases=("attend.blocks=64.base.multi_token@partition=512", "attend.blocks=128.base.multi_token@partition=512"),
        victim="partitioned",
    ),
    Mutant(
        "partitions_of_64_overlap",
        "L2",
        "partitions of fewer than 128 keys begin as if they had 128",
        "backend.py",
        "for first in range(0, max(held, 1), self.partition):",
        "for first in range(0, max(held, 1), max(self.partition, 128)):",
        cases=("attend.blocks=64.base.multi_token@partition=64", "attend.blocks=128.base.multi_token@partition=64"),
        victim="partitioned",
    ),
)
