"""Parameters of what follows attention: gated and plain layers, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.errors import ModelError
from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import Switch, switched
from kvcore.models.parameters.weight import Weight, Weights, matrix, vector, width

FeedForward = Callable[[Fields, int], Weights]
Rule = Callable[[Fields, int], bool]
Size = str | Callable[[Fields], int]


def size(fields: Fields, given: Size) -> int:
    """A width: a field that the config has to state, or a rule."""
    return width(fields, given) if isinstance(given, str) else given(fields)


def gated(wide: Size = "intermediate_size", bias: Switch = False, *, name: str = "mlp") -> FeedForward:
    """Gate, up and down."""

    def weights(fields: Fields, index: int) -> Weights:
        d, wider, added = fields.integer("hidden_size"), size(fields, wide), switched(fields, bias)
        return [
            *matrix(f"{name}.gate_proj", wider, d, bias=added, parts=wider),
            *matrix(f"{name}.up_proj", wider, d, bias=added, parts=wider),
            *matrix(f"{name}.down_proj", d, wider, bias=added, parts=wider, rows=True),
        ]

    return weights


def plain(wide: Size = "intermediate_size", bias: Switch = False, *, name: str = "mlp") -> FeedForward:
    """Up and down, without a gate."""

    def weights(fields: Fields, index: int) -> Weights:
        d, wider, added = fields.integer("hidden_size"), size(fields, wide), switched(fields, bias)
        return [
            *matrix(f"{name}.up_proj", wider, d, bias=added, parts=wider),
            *matrix(f"{name}.down_proj", d, wider, bias=added, parts=wider, rows=True),
        ]

    return weights


def experts(
    wide: Size = "moe_intermediate_size",
    number: str = "num_experts",
    *,
    bias: bool = False,
    router_bias: bool = False,
    matrices: int = 3,
    name: str = "mlp",
) -> FeedForward:
    """A router, and matrices of experts whose widths tensor ranks share out.

    Routers are never quantized and lie whole on every rank.

    Args:
        wide: Width of one expert.
        number: Field with the number of experts.
        bias: Whether each matrix of an expert has a bias.
        router_bias: Whether the router has one.
        matrices: 3 with a gate, 2 without.
        name: Path of the module that holds them; empty for the layer itself.
    """

    def weights(fields: Fields, index: int) -> Weights:
        inside = f"{name}." if name else ""
        d, wider, count = fields.integer("hidden_size"), size(fields, wide), width(fields, *fields.names(number))
        up = ("gate_proj", "up_proj")[3 - matrices :]
        found = vector(f"{inside}gate", count * d) + vector(f"{inside}gate.bias", count if router_bias else 0)
        for matrix_name in up:
            found += matrix(f"{inside}experts.{matrix_name}", wider, d, bias=bias, parts=wider, copies=count)
        return found + matrix(f"{inside}experts.down_proj", d, wider, bias=bias, parts=wider, rows=True, copies=count)

    return weights


def both(*parts: FeedForward) -> FeedForward:
    """Several side by side, such as experts and one that all tokens share."""
    return lambda fields, index: [weight for part in parts for weight in part(fields, index)]


def either(sparse: Rule, experts: FeedForward, dense: FeedForward) -> FeedForward:
    """Experts in the layers of a rule, a dense layer in the others."""
    return lambda fields, index: (experts if sparse(fields, index) else dense)(fields, index)


def shared(
    wide: Size, bias: Switch = False, *, gate: bool = False, matrices: int = 3, name: str = "mlp.shared_experts"
) -> FeedForward:
    """The expert that every token takes; none where its width is 0.

    Args:
        wide: Its width.
        bias: Whether its matrices have biases.
        gate: Whether a gate of one number a token scales it.
        matrices: 3 with a gated activation, 2 without.
        name: Path of the module.
    """

    def weights(fields: Fields, index: int) -> Weights:
        wider = size(fields, wide)
        if not wider:
            return []
        layer = (gated if matrices == 3 else plain)(lambda _: wider, bias, name=name)(fields, index)
        return layer + ([Weight(f"{name}_gate", (1, fields.integer("hidden_size")))] if gate else [])

    return weights


def times(number: str, wide: str, default: int = 0) -> Callable[[Fields], int]:
    """A width of so many experts in one."""
    return lambda fields: (fields.optional(number, least=0) or default) * width(fields, wide)


def every(fields: Fields, index: int) -> bool:
    """All layers have experts."""
    return True


def from_layer(name: str) -> Rule:
    """Experts from the layer on that a field names."""
    return lambda fields, index: index >= fields.integer(name, least=0)


def by_layer(fields: Fields, name: str) -> list[object] | None:
    """A list with an entry for each layer, those that predict further tokens perhaps among them; None without one.

    Raises:
        ModelError: It is shorter.
    """
    marks = fields.listing(name) if isinstance(fields.get(name), list) else None
    if marks is not None and len(marks) < fields.layers:
        raise ModelError(
            f"{name} in config.json does not fit the number of layers",
            field=name,
            got=f"{len(marks)} entries",
            allowed=f"one for each of {fields.layers} layers",
        )
    return marks


def listed(name: str = "mlp_layer_types", sparse: object = "sparse", otherwise: Rule = every) -> Rule:
    """Experts where a list by layer says so; `otherwise` where the config has no such list."""

    def rule(fields: Fields, index: int) -> bool:
        marks = by_layer(fields, name)
        return otherwise(fields, index) if marks is None else bool(marks[index] == sparse)

    return rule


def stepped(step: str, *, but: str | None = None, number: str | None = None) -> Rule:
    """Experts in every `step`-th layer, but not in those that `but` lists, and in none where `number` is 0."""

    def rule(fields: Fields, index: int) -> bool:
        if but is not None and index in (fields.indices(but, fields.layers) or ()):
            return False
        if number is not None and not fields.integer(number, least=0):
            return False
        return (index + 1) % fields.integer(step) == 0

    return rule
