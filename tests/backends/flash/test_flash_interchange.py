"""Equal fingerprints read each other's cache: one backend writes, another attends."""

from dataclasses import replace

import pytest
from backends.flash.flash_cases import case

from kvcore.errors import LayoutError
from kvcore.memory.convert import require_readable
from kvcore.registry.loader import installed
from kvcore.testing import Case
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.checks.attend import attend_once, judge
from kvcore.testing.checks.context import Context, Instance
from kvcore.testing.checks.scene import Scene

# Writer, its options, reader, its options, page.
PAIRS = {
    "torch to flashinfer": ("torch", {"layout": "hnd"}, "flashinfer", {"layout": "hnd"}, 16),
    "flashinfer to torch": ("flashinfer", {"layout": "hnd"}, "torch", {"layout": "hnd"}, 32),
    "torch to flash_attn": ("torch", {"layout": "kv_first"}, "flash_attn", {}, 256),
    "flash_attn to torch": ("flash_attn", {}, "torch", {"layout": "kv_first"}, 256),
}


def instance(name, options):
    spec = installed().backends[name]
    target, missing = switch_on(spec, spec.Config(**options), here())
    assert missing is None
    return Instance(target)


def layout_of(made: Instance, chosen: Case, wanted: set[str]):
    """The first offered layout of a set of names, and its number."""
    offered = list(made.target.spec.layouts(chosen.cache_spec(), made.target.facts, made.target.options))
    names = [o.layout.name for o in offered]
    number = next(i for i, n in enumerate(names) if n in wanted)
    return number, offered[number].layout.at(chosen.kernel_block_size)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("phase", ["decode", "chunked"])
def test_one_writes_and_another_attends(pair, phase):
    writer_name, writer_options, reader_name, reader_options, page = PAIRS[pair]
    writer, reader = instance(writer_name, writer_options), instance(reader_name, reader_options)
    chosen = case(f"interchange.{pair}", phase, page, lse=True)
    wanted = {"kv_first"} if page == 256 else {"hnd"}
    number, written = layout_of(writer, chosen, wanted)
    _, read = layout_of(reader, chosen, wanted)
    assert written.fingerprint == read.fingerprint
    require_readable(written.fingerprint, read)

    scene = Scene(replace(chosen, layout=number), writer.target)
    (layer,), (group,) = scene.layers, scene.groups()
    fresh, views = scene.fresh(layer), scene.views[layer.layer.cache_id]
    mine, theirs = writer.get(), reader.get()
    mine.write(layer.layer, fresh, views, mine.prepare(scene.batch, group))
    # Only the bytes pass from one to the other.
    metadata = theirs.prepare(scene.batch, group)
    result = attend_once(Context(chosen, reader), scene, layer, layer.q, metadata)
    judge(scene, layer, result)


def test_unlike_layouts_have_other_fingerprints():
    chosen = case("unlike", "decode", 16)
    _, hnd = layout_of(instance("flashinfer", {"layout": "hnd"}), chosen, {"hnd"})
    _, nhd = layout_of(instance("flashinfer", {"layout": "nhd"}), chosen, {"nhd"})
    with pytest.raises(LayoutError, match="convert"):
        require_readable(hnd.fingerprint, nhd)
    other = case("unlike", "decode", 32)
    _, larger = layout_of(instance("flashinfer", {"layout": "hnd"}), other, {"hnd"})
    with pytest.raises(LayoutError, match="convert"):
        require_readable(hnd.fingerprint, larger)
