"""The kernels of `kvcore.memory.kernels`, as they are launched: (name, types, compile-time constants)."""


def _of(pointers, *integers):
    return pointers | dict.fromkeys(integers, "i32")


def _slots(first, *counts):
    pointers = {"table_ptr": "*i32", "first_block_ptr": "*i32", "out_ptr": "*i64"}
    return _of(pointers | first, "table_stride", *counts, "total", "block_size", "columns", "world", "rank")


_COPY = ("source_layer", "source_run", "source_block", "target_layer", "target_run", "target_block", "runs", "width")
_ZERO = ("target_layer", "target_run", "target_block", "runs", "width")
_WRITE = (
    "field_block",
    "field_token",
    "field_outer",
    "field_inner",
    "values_token",
    "values_outer",
    "values_inner",
    "block_size",
    "inner",
    "total",
)

UNITS = ("*i64", "*i32", "*i16", "*i8")
SIGNATURES = [
    ("slots_of_sequences", _slots({"starts_ptr": "*i32", "computed_ptr": "*i32"}, "seqs"), {"BLOCK": 256}),
    *(
        (
            "copy_pieces",
            _of({"source_ptr": unit, "target_ptr": unit, "from_ptr": "*i64", "to_ptr": "*i64"}, *_COPY),
            {"BLOCK": 1024},
        )
        for unit in UNITS
    ),
    *(("zero_pieces", _of({"target_ptr": unit, "blocks_ptr": "*i64"}, *_ZERO), {"BLOCK": 1024}) for unit in UNITS),
    *(
        ("write_slots", _of({"field_ptr": kind, "values_ptr": kind, "slots_ptr": "*i64"}, *_WRITE), {"BLOCK": 1024})
        for kind in ("*bf16", "*u8")
    ),
]
