"""The module that the entry point names."""

from collections.abc import Sequence

import kvcore
from kvcore.attention.spec import BackendSpec
from kvcore_example.spec import ExampleSpec


@kvcore.hookimpl
def kvcore_backends() -> Sequence[type[BackendSpec]]:
    """Our one backend."""
    return (ExampleSpec,)
