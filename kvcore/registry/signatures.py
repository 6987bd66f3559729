"""Does an installed library still take the keywords that an adapter passes? Asked before the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kvcore.errors import BackendUnavailableError


def missing_parameters(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """The names that are no parameters of `function`, in the order given.

    ``**kwargs`` does not count: a function that takes anything says nothing about what it honours.
    """
    found = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
    }
    return [name for name in names if name not in found]


def require_parameters(
    function: Callable[..., Any], names: Iterable[str], *, shown: str, backend: str, version: str
) -> None:
    """Raise `BackendUnavailableError` unless `function` has every parameter that the adapter passes.

    Args:
        function: A function of the installed library.
        names: The keywords that the adapter passes.
        shown: The function's name for people.
        backend: Name of the backend.
        version: Distribution and version installed, for the message.
    """
    missing = missing_parameters(function, names)
    if missing:
        raise BackendUnavailableError(
            f"backend {backend} passes {', '.join(missing)} to {shown}, which {version} does not take",
            field=f"{shown}({missing[0]})",
            got=version,
            allowed=f"a version whose {shown} takes it",
            remedy=f"install a version of the library that backend {backend} was written for",
        )
