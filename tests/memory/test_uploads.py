"""Block ids reach a device without the host waiting for it."""

import torch

from kvcore.memory import copy, poison, staging
from kvcore.memory.arena import Arena
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import nhd
from kvcore.spec.retention import Full


def test_on_a_cpu_the_numbers_are_there_at_once():
    found = staging.uploaded(range(3, 6), "cpu")
    assert found.dtype == torch.int64
    assert found.tolist() == [3, 4, 5]
    assert staging.uploaded([], torch.device("cpu")).shape == (0,)


def test_for_a_gpu_they_leave_pinned_memory_and_the_host_goes_on(monkeypatch):
    asked = []

    class Staged:
        def to(self, device, *, non_blocking=False):
            asked.append((str(device), non_blocking))
            return self

    def tensor(numbers, *, dtype, pin_memory):
        asked.append((list(numbers), dtype, pin_memory))
        return Staged()

    monkeypatch.setattr(staging.torch, "tensor", tensor)
    staging.uploaded([7, 9], "cuda:1")
    assert asked == [([7, 9], torch.int64, True), ("cuda:1", True)]


def test_block_operations_stage_their_ids_so(plans, monkeypatch):
    content, seen = KVHeads(2, 8, dtype="float16"), []
    config = plans.make([((0,), content, Full(), nhd(content), None)])

    def record(numbers, device):
        seen.append((list(numbers), str(device)))
        return staging.uploaded(numbers, device)

    for module in (copy, poison):
        monkeypatch.setattr(module, "uploaded", record)
    arena = Arena(config.total_bytes)
    copy.copy_blocks(arena, config, 0, [(1, 2), (3, 4)])
    copy.zero_blocks(arena, config, 0, [2])
    assert seen == [([1, 3], "cpu"), ([2, 4], "cpu"), ([2], "cpu")]
    poison.poison_blocks(arena, config, 0, [3])
    assert len(seen) == 4
