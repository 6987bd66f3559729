"""The module that the entry point names: each hook returns classes."""

import kvcore
from kvcore_example.spec import ExampleSpec
from kvcore_example.storage import LazyWindow, NormedKV


@kvcore.hookimpl
def kvcore_backends():
    return (ExampleSpec,)


@kvcore.hookimpl
def kvcore_contents():
    return (NormedKV,)


@kvcore.hookimpl
def kvcore_retentions():
    return (LazyWindow,)
