"""The bridged, flattened batch gives transformers' own logits."""

import pytest
import torch
from models.dense_context import DenseContext
from models.tiny import DEFAULT_RUN, SPECS, reference_model, tiny_model

from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.settings.cache import CacheSettings

TOLERANCE = 1e-4


def load(path):
    facts = model_facts(read_config(path), cache=CacheSettings(mla="expanded"))
    return TransformersModel.load(path, facts, dtype="float32", device="cpu")


def tokens(count, seed):
    return torch.randint(1, 250, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(reference, ids):
    return reference(ids[None], use_cache=False).logits[0].float()


def flat_step(model, context, parts):
    """One step of [(sequence, ids, first position)]; logits of all rows, cut by sequence."""
    ids = torch.cat([p[1] for p in parts])
    positions = torch.cat([torch.arange(p[2], p[2] + len(p[1])) for p in parts])
    context.step([(p[0], len(p[1])) for p in parts])
    logits = model.forward(ids, positions, torch.arange(len(ids)), context)
    return torch.split(logits, [len(p[1]) for p in parts])


def check_parity(name, tmp_path):
    path = tiny_model(name, tmp_path)
    model, reference = load(path), reference_model(path)
    model.check_reached()
    first, second = tokens(70, 1), tokens(41, 2)
    want_first, want_second = reference_logits(reference, first), reference_logits(reference, second)
    # Unlike lengths in one batch; then both grow together, in a chunk and by one token.
    context = DenseContext(model.queries, shared=model.facts.shared)
    steps = [((0, 37), (0, 29)), ((37, 69), (29, 40)), ((69, 70), (40, 41))]
    for (a, b), (c, d) in steps:
        got_first, got_second = flat_step(model, context, [(0, first[a:b], a), (1, second[c:d], c)])
        for got, want in ((got_first, want_first[a:b]), (got_second, want_second[c:d])):
            assert (got - want).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("name", [*DEFAULT_RUN, "phi3_longrope"])
def test_bridged_logits_equal_transformers(name, tmp_path_factory):
    check_parity(name, tmp_path_factory.getbasetemp())


def runnable(name, tmp_path):
    facts = model_facts(read_config(tiny_model(name, tmp_path)), cache=CacheSettings(mla="expanded"))
    return not facts.refusals_for(96)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in SPECS if n not in (*DEFAULT_RUN, "phi3_longrope")])
def test_other_bridged_logits_equal_transformers(name, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    if not runnable(name, base):
        pytest.skip("run refuses this architecture; test_refusals says why")
    check_parity(name, base)
