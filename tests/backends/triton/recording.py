"""A launcher that checks a launch instead of running it: types, strides, grid, bounds of every access."""

import inspect

import torch
from kvcore_triton.kernels import attention, write
from kvcore_triton.work import ITEM_COLUMNS

from kvcore.memory.kernels.launch import Launcher

INT32 = 2**31
FIELDS = (("k", "D"), ("v", "DV"))


class Recorder(Launcher):
    """Keeps every launch; tensors are on the meta device, so that no shape costs memory."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def __call__(self, kernel, grid, args, **options):
        names = list(inspect.signature(kernel.fn).parameters)
        assert set(args) == set(names), set(args) ^ set(names)
        assert 1 <= grid[0] < INT32
        assert all(1 <= n <= 65535 for n in grid[1:]), grid
        assert options["num_warps"] in (1, 2, 4, 8, 16)
        for name, value in args.items():
            if name.endswith("_ptr"):
                assert isinstance(value, torch.Tensor), name
                assert value.numel() > 0 or name.startswith("part"), name
            else:
                assert isinstance(value, int | float | bool), (name, type(value))
                assert not isinstance(value, int) or -(2**63) <= value < 2**63
        self.launches.append((kernel, grid, args, options))


def extent(tensor):
    """Elements from the first to one after the last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def widest_field(args, name, dim, blocks, heads):
    """One after the largest element that a kernel reaches in a field, by the strides that it was given."""
    size = args["block_size"]
    return (
        (blocks - 1) * args[f"{name}_block"] + (size - 1) * args[f"{name}_token"]
        + (heads - 1) * args[f"{name}_head"] + args[dim]
    )  # fmt: skip


def check_attend(launch, items, tokens, heads, kv_heads, blocks):
    """The attention kernel: every item in bounds, every query and head exactly once."""
    kernel, grid, args, _ = launch
    assert kernel is attention.attend_tiles
    assert items.shape[1] == ITEM_COLUMNS
    assert len(items) == grid[0]
    assert grid[1] == kv_heads * args["tiles_per_head"]
    assert args["heads"] * args["tiles_per_head"] >= args["group"]
    for name in ("work_ptr", "table_ptr"):
        assert args[name].dtype == torch.int32
    for name, dim in FIELDS:
        assert widest_field(args, name, dim, blocks, kv_heads) == extent(args[f"{name}_ptr"])
    for name, dim in (("q", "D"), ("out", "DV")):
        reach = (tokens - 1) * args[f"{name}_token"] + (heads - 1) * args[f"{name}_head"] + args[dim]
        assert reach == extent(args[f"{name}_ptr"])
    rows = args["BLOCK_M"] // args["heads"]
    assert (items[:, 2] >= 1).all()
    assert (items[:, 2] <= rows).all()
    assert (items[:, 1] + items[:, 2] <= tokens).all()
    assert (items[:, 4] >= items[:, 6]).all()
    assert (items[:, 5] <= items[:, 7].clip(min=items[:, 4])).all()
    columns = args["table_ptr"].shape[1]
    last_column = (items[:, 5] - 1 - items[:, 6]) // args["block_size"]
    assert (last_column < columns).all()
    parts = items[items[:, 8] >= 0, 8]
    assert sorted(parts) == list(range(len(parts)))
    needed = len(parts) * grid[1] * args["BLOCK_M"]
    assert args["part_lse_ptr"].numel() >= needed
    assert args["part_ptr"].numel() >= needed * args["DVP"]


def check_write(launch, tokens, kv_heads, blocks):
    """The write kernel: one program a token and head tile, strides those of the views."""
    kernel, grid, args, _ = launch
    assert kernel is write.write_step
    assert grid == (tokens, -(-kv_heads // args["HEADS"]))
    assert args["slots_ptr"].dtype == torch.int64
    for name, dim in FIELDS:
        assert widest_field(args, name, dim, blocks, kv_heads) == extent(args[f"{name}_field_ptr"])
        reach = (
            (tokens - 1) * args[f"{name}_value_token"]
            + (kv_heads - 1) * args[f"{name}_value_head"]
            + args[dim]
        )
        assert reach == extent(args[f"{name}_ptr"])
