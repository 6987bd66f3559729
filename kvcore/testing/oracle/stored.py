"""What a cache of any content holds for keys and values, and what its fields stand for.

The core's own contents are encoded by `kvcore.testing.oracle.quant`. One of a plugin brings `encode` and `decode`, or
says that it is read as written. Its fields are then judged twice, because the backend computes them in another order:
each field lies near the encoded one, and all of them together stand for what was written. With u the unit roundoff of
a field's dtype, a that of float32 (float64 for float64), D the elements of a token and head, and M the largest number
of a token and head, near is ``(2 u + a (4 sqrt(D) + 8)) M``: one rounding each by the backend and the reference, and
sums over D.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvcore.memory.dtypes import torch_dtype
from kvcore.spec.content import Content, KVHeads, Latent, LogicalField
from kvcore.testing.oracle import quant
from kvcore.testing.oracle.attention import Array
from kvcore.testing.oracle.tolerance import UNIT_ROUNDOFF

Fields = dict[str, torch.Tensor]
Values = Mapping[str, Array]
Scales = Mapping[str, Array | None]
_ROUNDOFF = {**UNIT_ROUNDOFF, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 2.0**-8}


def is_own(content: Content) -> bool:
    """Whether a content is a plugin's: what its fields hold only it can say."""
    return type(content) not in (KVHeads, Latent)


def written(content: Content) -> tuple[str, ...]:
    """The tensors that a write is given; all fields follow from them."""
    return ("latent",) if type(content) is Latent else ("k", "v")


def encode(content: Content, values: Values, scales: Scales) -> Fields:
    """What the cache must hold.

    Args:
        content: Any content.
        values: float64 [n, K, D] by name of `written`; a latent is one head.
        scales: The layer's constant scales by name, for tensor and head granularity.

    Returns:
        Fields [n, *axes] in storage dtypes: every one, or ``k`` and ``v`` alone of a content that is read as written.

    Raises:
        NotBuiltError: A plugin's content says neither.
    """
    if isinstance(content, KVHeads | Latent) and not is_own(content):
        found: Fields = {}
        for name, x in values.items():
            found |= quant.encode(content, name, x, scales.get(name))
        return found
    given = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in values.items()}
    if content.read_as_written:
        dtypes = {f.name: torch_dtype(f.dtype) for f in content.fields()}
        return {name: x.to(dtypes[name]) for name, x in given.items()}
    return dict(content.encode(given))


def decode(content: Content, fields: Mapping[str, torch.Tensor], scales: Scales) -> dict[str, Array]:
    """The float64 values [n, K, D] that stored fields stand for, by name of `written`.

    Raises:
        NotBuiltError: A plugin's content does not say.
    """
    if isinstance(content, KVHeads | Latent) and not is_own(content):
        return {n: quant.decode(content, n, fields, scales.get(n)) for n in written(content)}
    numbers = fields if content.read_as_written else content.decode(fields)
    return {name: np.asarray(numbers[name].double().numpy()) for name in written(content)}


def write_problem(content: Content, values: Values, fields: Mapping[str, torch.Tensor], scales: Scales) -> str | None:
    """Why what a backend stored for `values` is not right, or None."""
    if isinstance(content, KVHeads | Latent) and not is_own(content):
        problems = (quant.write_problem(content, n, x, fields, scales.get(n)) for n, x in values.items())
        return next((problem for problem in problems if problem), None)
    want = encode(content, values, scales)
    if content.read_as_written:
        wrong = next((n for n in want if not torch.equal(want[n], fields[n])), None)
        return f"field {wrong} is not what was written" if wrong else None
    width = max(x.shape[-1] for x in values.values())
    for field in content.fields():
        problem = _unlike(field, fields[field.name], want[field.name], width)
        if problem:
            return problem
    got, best = (decode(content, f, scales) for f in (fields, want))
    for name, x in values.items():
        allowed = np.abs(best[name] - x) + _near(content.fields(), width) * np.abs(x).max(axis=-1, keepdims=True)
        bad = ~(np.abs(got[name] - x) <= allowed)
        if bad.any():
            return f"the fields of {content.kind} stand for other {name}: {_first(bad, got[name], x)}"
    return None


def content_problem(content: Content, values: Values) -> str | None:
    """Why a plugin's content contradicts itself, or None: fields as declared, and a way back.

    A round trip may lose what the fields' dtypes round, and what the content declares as its `loss`.

    Raises:
        NotBuiltError: It says neither how it is encoded nor that it is read as written.
    """
    fields = encode(content, values, {})
    declared = content.fields()
    if not content.read_as_written and set(fields) != {f.name for f in declared}:
        return f"encode gives the fields {sorted(fields)}, declared are {sorted(f.name for f in declared)}"
    tokens = len(next(iter(values.values())))
    for field in declared:
        want = (tokens, *(n for _, n in field.axes)), torch_dtype(field.dtype)
        found = fields.get(field.name)
        if found is not None and (tuple(found.shape), found.dtype) != want:
            return (
                f"encode gives {field.name} as {found.dtype} {list(found.shape)}, declared is {want[1]} {list(want[0])}"
            )
    back = decode(content, fields, {})
    share = _near(declared, max(x.shape[-1] for x in values.values())) + content.loss
    for name, x in values.items():
        if back[name].shape != x.shape:
            return f"decode gives {name} as {list(back[name].shape)}, written were {list(x.shape)}"
        bad = ~(np.abs(back[name] - x) <= share * np.abs(x).max(axis=-1, keepdims=True))
        if bad.any():
            return f"decode(encode({name})) is not {name}: {_first(bad, back[name], x)}"
    return None


def _unlike(field: LogicalField, got: torch.Tensor, want: torch.Tensor, width: int) -> str | None:
    a, b = (t.double().numpy() for t in (got, want))
    largest = np.abs(b).max(axis=-1, keepdims=True) if len(field.axes) > 1 else np.abs(b)
    # Integer codes: the neighbouring one, where dividing rounds differently.
    allowed = np.ones(()) if field.dtype.startswith("int") else _near((field,), width) * largest
    bad = ~(np.abs(a - b) <= allowed)
    return f"field {field.name} is not what the content encodes: {_first(bad, a, b)}" if bad.any() else None


def _near(fields: tuple[LogicalField, ...], width: int) -> float:
    """How far apart two right answers may lie, as a share of the largest number."""
    coarsest = max(_ROUNDOFF[f.dtype] for f in fields)
    sums = UNIT_ROUNDOFF["float64" if all(f.dtype == "float64" for f in fields) else "float32"]
    return float(2 * coarsest + sums * (4 * np.sqrt(width) + 8))


def _first(bad: np.typing.NDArray[np.bool_], got: Array, want: Array) -> str:
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"at {list(where)} (token, head, ...) {got[where]:.6g}, should be {want[where]:.6g}"
