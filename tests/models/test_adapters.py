"""Adapters are open to plugins, and a model type has one adapter only."""

from collections.abc import Iterable

import pytest

from kvcore.attention.query import Mask
from kvcore.errors import PluginError
from kvcore.models.families import BUILT_IN, adapters_by_type, model_facts
from kvcore.models.families.base import FamilyAdapter
from kvcore.models.parts import CachePart, Heads

CONFIG = {
    "model_type": "martian",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
    "eos_token_id": [1, 2],
}


class Martian(FamilyAdapter):
    model_types = ("martian",)

    def layer(self, fields, index, cache) -> Iterable[CachePart]:
        yield Heads(fields.heads, 1, fields.head_dim, mask=Mask(window=8 + index))


class Impostor(Martian):
    model_types = ("llama",)


def test_a_plugins_adapter_serves_its_type():
    facts = model_facts(CONFIG, adapters=[Martian])
    assert [c.spec.retention.size for c in facts.caches] == [8, 9, 10]
    assert (facts.dtype, facts.eos_token_ids, facts.max_model_len) == ("float16", (1, 2), 128)
    assert facts.refusals == ()


@pytest.mark.parametrize("adapters", [[Impostor], [Martian, Martian]])
def test_two_adapters_of_one_type_are_an_error(adapters):
    with pytest.raises(PluginError, match="two model adapters"):
        model_facts(CONFIG, adapters=adapters)


def test_built_in_adapters_do_not_collide():
    assert len(adapters_by_type()) == sum(len(a.model_types) for a in BUILT_IN) > 70
