"""The declaration: what the backend is called, serves and wants. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import kvcore.backend as kv

# Whatever is not named here is refused before a kernel runs, features of later versions included.
CAPABILITIES = kv.Capabilities(
    contents=("kv", "normed_kv"), dtypes=("float32",), features=("window", "scale", "unlike_dims")
)


@dataclass(frozen=True)
class ExampleOptions:
    """Set by `backends.example.x=8`, and shown by `--help`."""

    x: int = field(default=4, metadata={"help": "key elements that lie side by side"})

    def __post_init__(self) -> None:
        if self.x < 1:
            raise kv.ConfigError("x is no width", field="backends.example.x", got=self.x, allowed=">= 1")


class ExampleSpec(kv.BackendSpec):
    """Causal float32 attention, with and without a window, on x-packed keys."""

    name = "example"
    backend = "kvcore_example.backend:ExampleBackend"  # named, not imported: it loads torch
    priority = {"cpu": 1}
    Config = ExampleOptions
    reads_unwritten_slots = False  # we mask before we multiply
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: ExampleOptions) -> str | None:
        return None  # torch is a requirement of kvcore: nothing can be missing

    @classmethod
    def unsupported_device(cls, facts: kv.DeviceFacts, options: ExampleOptions) -> kv.Refusal | None:
        return None if facts.kind == "cpu" else kv.Refusal("device", facts.kind, "cpu")

    @classmethod
    def unsupported(cls, query: kv.AttentionQuery, options: ExampleOptions) -> kv.Refusal | None:
        if query.head_dim % options.x:
            return kv.Refusal("head_dim", query.head_dim, f"multiples of x={options.x}")
        return CAPABILITIES.check(query)

    @classmethod
    def layouts(cls, spec: kv.KVCacheSpec, facts: kv.DeviceFacts, options: ExampleOptions) -> Sequence[kv.LayoutOption]:
        """Keys [N, K, D/x, P, x], values [N, K, Dv, P], and norms [N, K, P] where the content has them."""
        content = spec.content
        if not isinstance(content, kv.KVHeads) or content.head_dim % options.x:
            return ()
        fields = []
        for f in content.fields():
            axes = [*(kv.Axis(*a) for a in f.axes), kv.Axis(kv.TOKEN, None)]
            if f.name == "k":
                split = kv.Axis("dim", content.head_dim // options.x)
                axes = [axes[0], split, kv.Axis(kv.TOKEN, None), kv.Axis("dim", options.x)]
            fields.append(kv.LayoutField(f.name, tuple(axes), f.dtype))
        return (kv.LayoutOption(kv.PageLayout("x_packed", tuple(fields)), kv.KernelBlocks(multiple_of=8)),)
