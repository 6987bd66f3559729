"""`Context`: what a check is given: the case, where it runs, and a backend that lives across cases."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvcore.attention.backend import AttentionBackend
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CheckFailure
from kvcore.testing.cases.planning import Target
from kvcore.testing.checks.scene import Scene


@dataclass
class Instance:
    """The backend of a run: made once, and made anew after a failure.

    Attributes:
        target: What it is made from.
    """

    target: Target
    _made: AttentionBackend | None = field(default=None, repr=False)

    def get(self) -> AttentionBackend:
        """The backend.

        Raises:
            CheckFailure: `create` gave something else.
        """
        if self._made is None:
            made = self.target.spec.create(self.target.device, self.target.options)
            for method in ("prepare", "write", "attend"):
                if not callable(getattr(made, method, None)):
                    raise CheckFailure(f"create returned {type(made).__name__}, which has no method {method}")
            self._made = made
        return self._made

    @property
    def used(self) -> bool:
        """Whether it was made, and may carry what earlier cases left."""
        return self._made is not None

    def drop(self) -> None:
        """Forget it: what it holds may be broken."""
        self._made = None


@dataclass
class Context:
    """One case on one backend.

    Attributes:
        case: The case.
        instance: The backend.
        again: The case was right already on another instance; what it shows is known.
    """

    case: Case
    instance: Instance
    again: bool = False
    _scenes: dict[tuple[int, int], Scene] = field(default_factory=dict, repr=False)

    def on(self, instance: Instance) -> Context:
        """The case once more, on another instance of the same backend; what was made of it serves again."""
        return replace(self, instance=instance, again=True)

    @property
    def target(self) -> Target:
        """Backend, options and device."""
        return self.instance.target

    @property
    def backend(self) -> AttentionBackend:
        """The backend itself."""
        return self.instance.get()

    def scene(self, *, seed: int = 0, elements: int = 0) -> Scene:
        """The case made real; every call gives one that nothing has touched."""
        if (seed, elements) not in self._scenes:
            made = Scene(self.case, self.target, seed=seed, elements=elements)
            if made.large:
                return made  # a copy would touch the memory that it leaves out
            self._scenes[seed, elements] = made
        return self._scenes[seed, elements].anew()
