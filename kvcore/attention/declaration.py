"""`BackendSpec`: what a plugin declares about its attention backend. Imports neither torch nor kernels.

A declaration lives in a module of its own, so that planning, listing and `--help` can read it on a
machine that has neither the library nor the device. Every question receives the backend's own options,
because an option can change the answer (a layout that was asked for, an interpreter switched on).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.attention.query import AttentionQuery
from kvcore.errors import PluginError, Refusal
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.layout import LayoutOption

if TYPE_CHECKING:
    from kvcore.attention.backend import AttentionBackend

API_VERSION = 1


@dataclass(frozen=True)
class DeviceFacts:
    """What a declaration may know of a device, present or not.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``rocm``.
        name: The device's name, for people.
        capability: CUDA compute capability (major, minor); None elsewhere.
        arch: Instruction set of a ROCm device such as ``gfx942``; empty elsewhere.
        memory_bytes: Total memory, 0 when unknown.
        present: Whether the device is in this machine.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    arch: str = ""
    memory_bytes: int = 0
    present: bool = True


@dataclass(frozen=True)
class NoOptions:
    """Options of a backend that has none."""


class BackendSpec(ABC):
    """A backend's declaration; subclasses are handed over by the hook `kvcore_backends`.

    Attributes:
        name: Unique, lower case; also the name of its options, ``backends.<name>``.
        backend: What makes the backend, as ``"module:name"``: a class or function called with (device, options).
            Named, not imported, so that the declaration stays light.
        api_version: Contract version; another than this core's is refused with both numbers.
        priority: Rank for ``backend=auto``, higher first, by device class (``cuda``, ``cuda:sm9x``,
            ``cuda:sm90``, ``rocm:gfx942``) or ``<device class>/<cache kind>``; the narrowest wins, and
            ``conf/priorities.yaml`` may say otherwise. A device that is missing here ranks 0.
        Config: Dataclass of typed options with defaults.
        batch_invariant: A row's bits do not depend on the other rows.
        deterministic: Equal input gives equal bits.
        graph_capture: `prepare` keeps addresses, so that a step can be captured.
        reads_unwritten_slots: May load slots that were never written (masked later): the core
            then keeps them finite.
        max_offset_bits: 31 or 63: element offsets that the kernels compute; larger views are refused.
        stand_ins: Boolean options that replace a missing device, and the level of proof each one leads
            to, such as ``{"interpret": "interpreter", "emulate": "emulated"}``; best first. `conform`
            switches them on by itself where the device is missing, and `auto` never chooses them.
        conform_options: Options under which other kernels run than by default, such as ``({"partition": 512},)``:
            `conform` asks its questions under each set as well. Choices and booleans it tries by itself.
    """

    name: ClassVar[str]
    backend: ClassVar[str] = ""
    api_version: ClassVar[int] = API_VERSION
    priority: ClassVar[Mapping[str, int]] = {}
    Config: ClassVar[type] = NoOptions
    batch_invariant: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False
    graph_capture: ClassVar[bool] = False
    reads_unwritten_slots: ClassVar[bool] = True
    max_offset_bits: ClassVar[int] = 31
    stand_ins: ClassVar[Mapping[str, str]] = {}
    conform_options: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    @abstractmethod
    def unavailable(cls, options: Any) -> str | None:
        """None when library and kernels are on this machine, else a reason and a remedy."""

    @classmethod
    @abstractmethod
    def unsupported_device(cls, facts: DeviceFacts, options: Any) -> Refusal | None:
        """Why a device cannot be served; must be answerable for devices that are not here."""

    @classmethod
    @abstractmethod
    def unsupported(cls, query: AttentionQuery, options: Any) -> Refusal | None:
        """Why a layer cannot be served, or None. What is not known is unsupported."""

    @classmethod
    @abstractmethod
    def layouts(cls, spec: KVCacheSpec, facts: DeviceFacts, options: Any) -> Sequence[LayoutOption]:
        """Layouts for a cache, in order of preference; empty when there is none for its content."""

    @classmethod
    def create(cls, device: str, options: Any) -> AttentionBackend:
        """The backend itself on a torch device; imports the library. By default what `backend` names is called."""
        module, _, name = cls.backend.partition(":")
        if not name:
            raise PluginError(
                f"the declaration of {cls.name} does not say what makes the backend",
                field="backend",
                got=cls.backend,
                allowed="module:name",
                remedy="set `backend` on the declaration, or override `create`",
            )
        made: AttentionBackend = getattr(import_module(module), name)(device, options)
        return made

    @classmethod
    def proof(cls, options: Any, facts: DeviceFacts) -> str:
        """How strong a proof a run with these options is: device, interpreter, host or emulated.

        By default the level of the first of `stand_ins` that is switched on, else ``device``.
        """
        for option, proof in cls.stand_ins.items():
            if getattr(options, option, False):
                return proof
        return "device"
