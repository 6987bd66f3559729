"""A launcher that checks a launch instead of running it: types, strides, grid, bounds of every access."""

from functools import lru_cache

import torch
from kvcore_triton.kernels import attention, write
from kvcore_triton.tile_schedule import ITEM_COLUMNS, MERGE_COLUMNS
from kvcore_triton.variants import every

from kvcore.memory.kernels.launch import Launcher

INT32 = 2**31
FIELDS = (("k", "D"), ("v", "DV"))
KERNELS = {"attend_tiles": "attend", "merge_splits": "merge", "write_step": "write"}


class Recorder(Launcher):
    """Keeps every launch; tensors are on the meta device, so that no shape costs memory.

    Args:
        target: Every launch must be one that was compiled ahead of time for it; None where tiles are forced.
    """

    def __init__(self, target="sm_90"):
        super().__init__()
        self.launches, self.target = [], target

    def __call__(self, kernel, grid, args, **options):
        assert set(args) == set(kernel.arg_names), set(args) ^ set(kernel.arg_names)
        assert 1 <= grid[0] < INT32
        assert all(1 <= n <= 65535 for n in grid[1:]), grid
        for param in kernel.params:
            value = args[param.name]
            if param.name.endswith("_ptr"):
                assert isinstance(value, torch.Tensor), param.name
                assert value.numel() > 0 or param.name.startswith("partial"), param.name
                # Triton compiles a kernel anew for a tensor that does not start at 16 bytes.
                at = value.storage_offset() * value.itemsize
                assert param.do_not_specialize or at % 16 == 0, (param.name, at)
            elif not param.is_constexpr:
                assert param.do_not_specialize, f"a kernel for each kind of {param.name}"
                assert isinstance(value, float) or -INT32 <= value < INT32, (param.name, value)
        assert self.target is None or launched(kernel, args, options) in compiled_ahead(self.target)
        self.launches.append((kernel, grid, args, options))


def launched(kernel, args, options):
    """What Triton compiles for a launch, as far as it is not the same for all launches of the kernel."""
    from triton.runtime.jit import mangle_type

    types = {p.name: mangle_type(args[p.name]) for p in kernel.params if not p.is_constexpr}
    constants = {p.name: args[p.name] for p in kernel.params if p.is_constexpr}
    return KERNELS[kernel.fn.__name__], *(tuple(sorted(x.items())) for x in (types, constants, options))


@lru_cache
def compiled_ahead(target):
    """The same of every variant that the long tests compile."""
    found = set()
    for variant in every((target,)):
        parts = (*variant.signature(), variant.options())
        found.add((variant.kernel, *(tuple(sorted(x.items())) for x in parts)))
    return found


def extent(tensor):
    """Elements from the first to one after the last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def widest_field(args, name, dim, blocks, heads, unit):
    """One after the largest element that a kernel reaches in a field, by the strides that it was given."""
    size = args["block_size"]
    rows = (
        (blocks - 1) * args[f"{name}_block"] + (size - 1) * args[f"{name}_token"] + (heads - 1) * args[f"{name}_head"]
    )
    return rows * args[unit] + args[dim]


def widest_row(args, name, dim, tokens, heads):
    """The same in queries, values or outputs."""
    return ((tokens - 1) * args[f"{name}_token"] + (heads - 1) * args[f"{name}_head"]) * args["UNIT"] + args[dim]


def check_attend(launch, items, tokens, heads, kv_heads, blocks):
    """The attention kernel: every item in bounds, every query and head exactly once."""
    kernel, grid, args, _ = launch
    assert kernel is attention.attend_tiles
    assert items.shape[1] == ITEM_COLUMNS
    assert len(items) == grid[0]
    check_heads(grid, args, kv_heads)
    for name in ("work_ptr", "table_ptr"):
        assert args[name].dtype == torch.int32
    for name, dim in FIELDS:
        reach = widest_field(args, name, dim, blocks, kv_heads, "CACHE_UNIT")
        assert reach == extent(args[f"{name}_ptr"])
    for name, dim in (("q", "D"), ("out", "DV")):
        assert widest_row(args, name, dim, tokens, heads) == extent(args[f"{name}_ptr"])
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
    check_workspace(grid, args, len(parts))


def check_heads(grid, args, kv_heads):
    """The second axis of the grid covers every query head."""
    assert grid[1] == kv_heads * args["tiles_per_head"]
    assert args["heads"] * args["tiles_per_head"] >= args["group"]
    assert args["BLOCK_M"] >= args["heads"]


def check_workspace(grid, args, parts):
    """Room for all parts."""
    needed = parts * grid[1] * args["BLOCK_M"]
    assert args["partial_lse_ptr"].numel() >= needed
    assert args["partial_ptr"].numel() >= needed * args["DVP"]


def check_merge(launch, attend, merges, items, tokens, heads, kv_heads):
    """The merge: the parts of each tile as the attention kernel left them, and its rows in bounds."""
    kernel, grid, args, _ = launch
    assert kernel is attention.merge_splits
    assert merges.shape[1] == MERGE_COLUMNS
    assert len(merges) == grid[0]
    check_heads(grid, args, kv_heads)
    shared = ("partial_ptr", "partial_lse_ptr", "sinks_ptr", "out_ptr", "lse_ptr")
    assert all(args[n] is attend[n] for n in shared)
    assert all(args[n] == attend[n] for n in args if n in attend and n not in shared)
    assert widest_row(args, "out", "DV", tokens, heads) == extent(args["out_ptr"])
    assert (merges[:, 0] >= 0).all()
    assert (merges[:, 0] + merges[:, 1] <= tokens).all()
    assert (merges[:, 3] >= 2).all(), "what is not split is not merged"
    assert merges[0, 2] == 0
    assert (merges[1:, 2] == merges[:-1, 2] + merges[:-1, 3]).all()
    check_workspace(grid, args, int(merges[-1, 2] + merges[-1, 3]))
    for row, count, first, parts in merges:
        mine = items[(items[:, 8] >= first) & (items[:, 8] < first + parts)]
        assert len(mine) == parts
        assert (mine[:, 1:3] == (row, count)).all()


def check_write(launch, tokens, kv_heads, blocks):
    """The write kernel: one program a token and head tile, strides those of the views."""
    kernel, grid, args, _ = launch
    assert kernel is write.write_step
    assert grid == (tokens, -(-kv_heads // args["HEADS"]))
    assert args["slots_ptr"].dtype == torch.int64
    for name, dim in FIELDS:
        reach = widest_field(args, name, dim, blocks, kv_heads, "FIELD_UNIT")
        assert reach == extent(args[f"{name}_field_ptr"])
        values = {f"{name}_{axis}": args[f"{name}_value_{axis}"] for axis in ("token", "head")}
        assert widest_row(args | values, name, dim, tokens, kv_heads) == extent(args[f"{name}_ptr"])
