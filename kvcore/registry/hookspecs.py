"""The hooks of kvcore. A distribution offers them through the entry-point group ``kvcore``.

Hooks return classes (declarations), never instances, so that listing costs nothing and imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from kvcore.attention.declaration import BackendSpec, DeviceFacts
    from kvcore.manage.watch.events import Event
    from kvcore.spec.content import Content
    from kvcore.spec.retention import Retention

PROJECT = "kvcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Every hook, with its arguments; implementations take the ones they name."""

    @hookspec
    def kvcore_backends(self) -> Sequence[type[BackendSpec]]:
        """Subclasses of `kvcore.BackendSpec`: declarations, each with a `name` of its own."""
        return ()

    @hookspec
    def kvcore_contents(self) -> Sequence[type[Content]]:
        """Subclasses of `kvcore.spec.content.Content`, each with a `kind` of its own.

        `cache.content=<kind>` stores caches so, wherever the class's `instead_of` can take the place of what
        the model's adapter says; adapters of plugins may use the classes directly.
        """
        return ()

    @hookspec
    def kvcore_retentions(self) -> Sequence[type[Retention]]:
        """Subclasses of `kvcore.spec.retention.Retention`, each with a `kind` of its own.

        `cache.retention=<kind>` keeps tokens so, wherever the class's `instead_of` can take the place of what
        the model's adapter says. What it keeps of a sequence is a tail that begins at `first_needed`.
        """
        return ()

    @hookspec
    def kvcore_model_adapters(self) -> Sequence[type[Any]]:
        """Subclasses of `kvcore.models.facts.ModelAdapter`: each reads the configs of its `model_types`.

        A model type that has an adapter already keeps it: the plugin's is left out, with a warning.
        """
        return ()

    @hookspec
    def kvcore_eviction_policies(self) -> Sequence[type[Any]]:
        """Subclasses of `kvcore.manage.policies.eviction.EvictionPolicy`, each with a `name` of its own.

        `cache.eviction=<name>` lets it choose which cached block goes first.
        """
        return ()

    @hookspec
    def kvcore_options(self) -> type[Any] | None:
        """A dataclass of typed options with defaults: it becomes the node ``plugins.<entry point name>``.

        Backends need no such hook: their `Config` becomes ``backends.<name>``.
        """

    @hookspec
    def kvcore_configure(self, options: Any) -> None:
        """Take the options that were composed: an instance of what this plugin's `kvcore_options` returned.

        Called on this plugin alone, before the engine is built, each time one is built in the process;
        the last call counts. A plugin without `kvcore_options` is never called.
        """

    @hookspec(firstresult=True)
    def kvcore_choose_backend(self, kind: str, candidates: Sequence[str], device: DeviceFacts) -> str | None:
        """Decide for one KV group of kind `kind` on `device`, among usable `candidates`; None abstains.

        `candidates` come best first.

        Asked only for `backend=auto`; an explicit choice is never overruled. An answer outside
        `candidates`, like an exception, marks the plugin as broken and counts as None.
        """

    @hookspec
    def kvcore_step_finished(self, stats: Mapping[str, float]) -> None:
        """Observe one engine step; one call a step, after its tokens are committed.

        `stats` has: step, seconds, scheduled_tokens, num_running, num_waiting, preemptions,
        blocks_used, blocks_total, blocks_cached, prefix_hit_tokens, prompt_tokens, output_tokens, copied_blocks,
        evictions. `step` grows by 1; seconds and scheduled_tokens are of this step; num_running, num_waiting,
        blocks_used, blocks_total and blocks_cached are states after it; all others are totals since the engine
        started. An observer that raises is reported and left out from then on.
        """

    @hookspec
    def kvcore_cache_events(self, events: Sequence[Event]) -> None:
        """Follow what can be hit, for routers and metrics; with `cache.events=true`, after each step that changed it.

        `events` are `kvcore.manage.watch.events.Stored`, `Removed` and `Cleared` in the order in which they happened:
        whoever applies them all has the index of the engine. As for steps, an observer that raises is left out.
        """
