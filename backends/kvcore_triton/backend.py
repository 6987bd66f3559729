"""The Triton backend: launches of the kernels, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcore.backend import (
    AttentionBackend,
    AttentionGroup,
    AttentionLayer,
    AttentionQuery,
    BackendUnsupportedError,
    Batch,
    DeviceFacts,
    Launcher,
    gpu_facts,
)
from kvcore_triton.arguments import (
    SCALES,
    Constants,
    dims,
    field_arguments,
    fp8_of,
    in_units,
    readable,
    scale_arguments,
    units,
    write_constants,
)
from kvcore_triton.kernels.attention import attend_tiles, merge_splits
from kvcore_triton.kernels.write import write_step
from kvcore_triton.launches import Launch, LaunchPlan, LaunchPlanner, max_block_m, max_partials
from kvcore_triton.options import TritonOptions
from kvcore_triton.targets import Target, compile_options, target_of
from kvcore_triton.tile_schedule import interval


class TritonBackend(AttentionBackend):
    """Attention and cache write in Triton.

    Args:
        device: Where it computes.
        options: Typed options.
        target: The class of device; None asks the device.
        processors: Its multiprocessors; None asks the device.
        launcher: Runs the kernels; tests put one here that only looks.
    """

    def __init__(
        self,
        device: str,
        options: TritonOptions,
        *,
        target: Target | None = None,
        processors: int | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.options = options
        interpret = options.interpret
        if interpret and self.device.type != "cpu":
            raise BackendUnsupportedError(
                "Triton's interpreter runs kernels on a CPU",
                field="backends.triton.interpret",
                got=device,
                allowed="cpu",
                remedy="device=cpu, or backends.triton.interpret=false",
            )
        self.target = target or _target(self.device, interpret)
        self.processors = processors or _processors(self.device, self.target)
        self.launch = launcher or Launcher(interpret=interpret)
        self._upcast = self.target.name == "interpreter"
        self._constants = Constants(self.device)
        self._buffers: dict[tuple[int, AttentionQuery], LaunchPlanner] = {}
        self._partials = torch.empty(0, dtype=torch.float32, device=self.device)

    def prepare(self, batch: Batch, group: AttentionGroup) -> LaunchPlan:
        """The list of work for the group's layers, in one upload."""
        key = (group.kv_group, group.query)
        if key not in self._buffers:
            self._buffers[key] = LaunchPlanner(self.device)
        return self._buffers[key].plan(batch, group, self.target, self.processors, self.options)

    def write(
        self,
        layer: AttentionLayer,
        tensors: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: LaunchPlan,
    ) -> None:
        """Keys and values into their slots, quantized where the layout says so, in one kernel."""
        constants = write_constants(layer, self.target)
        slots = metadata.group.slot_mapping_T
        unit, field_unit = constants["UNIT"], constants["FIELD_UNIT"]
        k, v = (in_units(tensors[name], unit) for name in ("k", "v"))
        fields = {name: _bytes(cache[name]) for name in ("k", "v")}
        num_heads = layer.query.num_kv_heads
        args: dict[str, Any] = {
            "k_ptr": k,
            "v_ptr": v,
            "k_field_ptr": fields["k"],
            "v_field_ptr": fields["v"],
            "slots_ptr": slots,
            "k_value_token": k.stride(0) // unit,
            "k_value_head": k.stride(1) // unit,
            "v_value_token": v.stride(0) // unit,
            "v_value_head": v.stride(1) // unit,
            "block_size": metadata.group.kernel_block_size,
            "num_heads": num_heads,
        }
        args |= field_arguments(cache, metadata.heads_first, field_unit)
        args |= scale_arguments(layer, cache, metadata.heads_first, self._constants)
        grid = (min(len(slots), len(k)), -(-num_heads // constants["HEADS"]))
        self.launch(write_step, grid, args | constants, **compile_options(self.target))

    def attend(
        self,
        layer: AttentionLayer,
        query: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
        metadata: LaunchPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attention of every sequence of the step."""
        unit, _ = units(layer)
        q, result = in_units(query["q"], unit), in_units(out, unit)
        sums = self._constants.get(0.0, 1) if lse is None else lse
        if lse is not None and lse.stride(1) != 1:
            sums = lse.clone(memory_format=torch.contiguous_format)
        args = self._layer_arguments(layer, cache, metadata) | {
            "q_ptr": q,
            "q_token": q.stride(0) // unit,
            "q_head": q.stride(1) // unit,
            "out_ptr": result,
            "out_token": result.stride(0) // unit,
            "out_head": result.stride(1) // unit,
            "lse_ptr": sums,
            "lse_token": 0 if lse is None else sums.stride(0),
            "want_lse": int(lse is not None),
        }
        for launch in metadata.launches:
            self._run(layer, launch, args)
        if result is not out:
            out.copy_(result)
        if lse is not None and sums is not lse:
            lse.copy_(sums)

    def _layer_arguments(
        self, layer: AttentionLayer, cache: Mapping[str, torch.Tensor], metadata: LaunchPlan
    ) -> dict[str, Any]:
        query = layer.query
        window, right, chunk = interval(query.mask)
        fp8 = fp8_of(layer, self.target)
        heads = query.num_heads
        slopes = self._constants.get(0.0, heads) if layer.alibi_slopes is None else layer.alibi_slopes
        sinks = self._constants.get(-torch.inf, heads) if layer.sinks is None else layer.sinks
        table = metadata.group.block_table_SN
        args = {
            "k_ptr": readable(cache["k"], fp8),
            "v_ptr": readable(cache["v"], fp8),
            "slopes_ptr": slopes,
            "sinks_ptr": sinks,
            "table_ptr": table,
            "table_row": table.stride(0),
            "scale": query.softmax_scale,
            "softcap": query.softcap or 0.0,
            "window": window,
            "right": right,
            "chunk": chunk,
            "block_size": metadata.group.kernel_block_size,
            "group": query.group_size,
            "SCALES": SCALES[query.quant],
            "HALF_BYTES": fp8 is not None and fp8.half_bytes,
            "UPCAST": self._upcast,
            "GENERAL": query.softcap is not None or layer.alibi_slopes is not None,
        }
        unit, cache_unit = units(layer)
        args |= {"UNIT": unit, "CACHE_UNIT": cache_unit}
        args |= field_arguments(cache, metadata.heads_first, cache_unit)
        args |= scale_arguments(layer, cache, metadata.heads_first, self._constants)
        return args | dims(layer)

    def _run(self, layer: AttentionLayer, launch: Launch, args: Mapping[str, Any]) -> None:
        block_m, block_n, num_warps, num_stages = launch.tile
        programs = layer.query.num_kv_heads * launch.tiles_per_head
        slots = launch.partials * programs * block_m
        width = int(args["DVP"])
        partial, partial_lse = self._workspace(layer.query, slots, width)
        own = {
            "work_ptr": launch.items,
            "partial_ptr": partial,
            "partial_lse_ptr": partial_lse,
            "heads": launch.heads,
            "tiles_per_head": launch.tiles_per_head,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        }
        grid = (len(launch.items), programs)
        options = compile_options(self.target, num_warps, num_stages)
        self.launch(attend_tiles, grid, {**args, **own}, **options)
        if not launch.partials:
            return
        merge = {name: args[name] for name in _MERGE if name in args}
        merge |= {name: own[name] for name in _MERGE if name in own} | {"merge_ptr": launch.merges}
        self.launch(merge_splits, (len(launch.merges), programs), merge, **compile_options(self.target))

    def _workspace(self, query: AttentionQuery, slots: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the partial results of split tiles: outputs [slots, width] and log-sum-exps [slots]."""
        needed = slots * (width + 1)
        if len(self._partials) < max(needed, 1):
            # The first step of a layer takes all that any step of layers of its shape will need, unless a
            # number of splits is forced.
            usual = max_partials(self.processors) * max_block_m(query, self.target, self.options) * (width + 1)
            self._partials = torch.empty(max(needed, usual), dtype=torch.float32, device=self.device)
        return self._partials[: slots * width], self._partials[slots * width : needed]


_MERGE = (
    "partial_ptr",
    "partial_lse_ptr",
    "sinks_ptr",
    "out_ptr",
    "lse_ptr",
    "want_lse",
    "out_token",
    "out_head",
    "lse_token",
    "group",
    "heads",
    "tiles_per_head",
    "DV",
    "DVP",
    "BLOCK_M",
    "UNIT",
    "UPCAST",
)


def _bytes(field: torch.Tensor) -> torch.Tensor:
    """fp8 fields as bytes: the write kernel makes their codes itself."""
    return field.view(torch.uint8) if field.is_floating_point() and field.itemsize == 1 else field


def _target(device: torch.device, interpret: bool) -> Target:
    facts = (gpu_facts(device) if device.type == "cuda" else None) or DeviceFacts(device.type)
    found = target_of(facts, interpret=interpret)
    if found is None:
        raise BackendUnsupportedError(
            "the Triton backend has no table for this device",
            field="device",
            got=facts.arch or facts.capability or facts.kind,
            allowed="cuda from 8.0, gfx942, gfx950, gfx1100, or cpu with backends.triton.interpret=true",
            remedy="choose another backend, such as backend=torch",
        )
    return found


def _processors(device: torch.device, target: Target) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return target.processors
