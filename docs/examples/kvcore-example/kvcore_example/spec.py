"""The declaration: what the backend is called, serves and wants. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import kvcore
from kvcore.attention.query import AttentionQuery, Capabilities, Unsupported
from kvcore.attention.spec import DeviceFacts
from kvcore.errors import ConfigError
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import TOKEN, Axis, KernelBlocks, LayoutField, LayoutOption, PageLayout

# Whatever is not named here is refused before a kernel runs, features of later versions included.
CAPABILITIES = Capabilities(
    contents=("kv", "normed_kv"), dtypes=("float32",), features=("window", "scale", "unlike_dims")
)


@dataclass(frozen=True)
class ExampleOptions:
    """Set by `backends.example.x=8`, and shown by `--help`."""

    x: int = field(default=4, metadata={"help": "key elements that lie side by side"})

    def __post_init__(self) -> None:
        if self.x < 1:
            raise ConfigError("x is no width", field="backends.example.x", got=self.x, allowed=">= 1")


class ExampleSpec(kvcore.BackendSpec):
    """Causal float32 attention, with and without a window, on x-packed keys."""

    name = "example"
    priority = {"cpu": 1}
    Config = ExampleOptions
    reads_unwritten_slots = False  # we mask before we multiply
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: ExampleOptions) -> str | None:
        return None  # torch is a requirement of kvcore: nothing can be missing

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: ExampleOptions) -> Unsupported | None:
        return None if facts.kind == "cpu" else Unsupported("device", facts.kind, "cpu")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: ExampleOptions) -> Unsupported | None:
        if query.head_dim % options.x:
            return Unsupported("head_dim", query.head_dim, f"multiples of x={options.x}")
        return CAPABILITIES.check(query)

    @classmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: ExampleOptions) -> Sequence[LayoutOption]:
        """Keys [N, K, D/x, P, x], values [N, K, Dv, P], and norms [N, K, P] where the content has them."""
        content = spec.content
        if not isinstance(content, KVHeads) or content.head_dim % options.x:
            return ()
        fields = []
        for f in content.fields():
            axes = [*(Axis(*a) for a in f.axes), Axis(TOKEN, None)]
            if f.name == "k":
                split = Axis("dim", content.head_dim // options.x)
                axes = [axes[0], split, Axis(TOKEN, None), Axis("dim", options.x)]
            fields.append(LayoutField(f.name, tuple(axes), f.dtype))
        return (LayoutOption(PageLayout("x_packed", tuple(fields)), KernelBlocks(multiple_of=8)),)

    @classmethod
    def create(cls, device: str, options: ExampleOptions):
        from kvcore_example.backend import ExampleBackend  # only now may torch be imported

        return ExampleBackend(options.x)
