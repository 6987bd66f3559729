"""The declaration: what the backend is called, serves and wants. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.attention.query import AttentionQuery, Capabilities, Unsupported
from kvcore.attention.spec import BackendSpec, DeviceFacts
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import KernelBlocks, LayoutOption, nhd

# Whatever is not named here is refused before a kernel runs, features of later versions included.
CAPABILITIES = Capabilities(contents=("kv",), dtypes=("float32",), features=("window", "scale"))


@dataclass(frozen=True)
class ExampleOptions:
    """Set by `backends.example.verbose=true`, and shown by `--help`."""

    verbose: bool = field(default=False, metadata={"help": "print the shape of every step"})


class ExampleSpec(BackendSpec):
    """Causal float32 attention, with and without a window."""

    name = "example"
    priority = {"cpu": 1}
    Config = ExampleOptions
    # We index by length and never load a slot that was not written.
    reads_unwritten_slots = False
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options: ExampleOptions) -> str | None:
        """Nothing is missing: torch is a requirement of kvcore."""
        return None

    @classmethod
    def unsupported_device(cls, facts: DeviceFacts, options: ExampleOptions) -> Unsupported | None:
        """CPUs only."""
        return None if facts.kind == "cpu" else Unsupported("device", facts.kind, "cpu")

    @classmethod
    def unsupported(cls, query: AttentionQuery, options: ExampleOptions) -> Unsupported | None:
        """The first fact outside the table."""
        return CAPABILITIES.check(query)

    @classmethod
    def layouts(
        cls, spec: KVCacheSpec, facts: DeviceFacts, options: ExampleOptions
    ) -> Sequence[LayoutOption]:
        """[N, P, K, D] for keys and for values, in kernel blocks of any multiple of 8."""
        if not isinstance(spec.content, KVHeads):
            return ()
        return (LayoutOption(nhd(spec.content), KernelBlocks(multiple_of=8)),)

    @classmethod
    def create(cls, device: str, options: ExampleOptions):
        """The backend; only now may torch be imported."""
        from kvcore_example.backend import ExampleBackend

        return ExampleBackend(options)
