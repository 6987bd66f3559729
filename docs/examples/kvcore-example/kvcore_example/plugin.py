"""The module that the entry point names: each hook returns classes."""

import kvcore.backend as kv
from kvcore_example.spec import ExampleSpec
from kvcore_example.storage import LazyWindow, NormedKV


@kv.hookimpl
def kvcore_backends():
    return (ExampleSpec,)


@kv.hookimpl
def kvcore_contents():
    return (NormedKV,)


@kv.hookimpl
def kvcore_retentions():
    return (LazyWindow,)
