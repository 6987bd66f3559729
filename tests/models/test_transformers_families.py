"""Every model type of transformers that makes text is planned or refused by name, and the docs say which."""

import json
import sys

import pytest
from models.make_families import TABLE, table, text

from kvcore.errors import ModelError
from kvcore.models.families import adapters_by_type, model_facts

FOUND = json.loads(TABLE.read_text())["types"]
KNOWN = adapters_by_type()


@pytest.fixture
def page(repo, monkeypatch):
    monkeypatch.syspath_prepend(str(repo / "docs" / "_ext"))
    yield __import__("families")
    del sys.modules["families"]


def test_the_docs_name_every_type_once(page, repo):
    _, planned, refused = page.families(repo / "docs")
    names = [name for group in (planned, refused) for listed in group.values() for name in listed]
    assert sorted(names) == sorted(FOUND)
    assert set(refused) == set(page.WHY)
    # What is said to keep other states is not planned by another name.
    assert not page.STATES & set(KNOWN)
    drawn = page.listing(repo / "docs")
    assert all(f"`{name}`" in drawn for name in FOUND)


@pytest.mark.parametrize("name", sorted({text for text, _ in FOUND.values()} - set(KNOWN)))
def test_what_is_not_known_is_refused_by_name(name):
    with pytest.raises(ModelError) as raised:
        model_facts({"model_type": name, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    assert (raised.value.field, raised.value.got) == ("model_type", name)


@pytest.mark.long
def test_the_list_is_that_of_transformers():
    assert TABLE.read_text() == text(table()), "run python tests/models/make_families.py"
