"""One cache over many calls: turns of a talk, cropping, selection of sequences, prefixes that an earlier batch left."""

from __future__ import annotations

import pytest
import torch
from support.tiny_transformers import padded, random_prompts
from transformers import DynamicCache

HOW = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def turn(model, inputs, cache):
    return model.generate(**inputs, **HOW, cache=cache)


def followed(inputs, answers, more):
    """The next turn: all so far, and more tokens."""
    size = len(answers)
    new = torch.cat((answers, torch.tensor(more)), 1)
    ones = torch.ones(size, new.shape[1] - inputs["input_ids"].shape[1], dtype=torch.long)
    return {"input_ids": new, "attention_mask": torch.cat((inputs["attention_mask"], ones), 1)}


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_second_turn_goes_on_where_the_first_ended(plain, cache_for, name):
    model, inputs = plain(name), padded(random_prompts(5))
    ours, theirs = cache_for(model), DynamicCache(config=model.config)
    more = random_prompts(1, longest=3, seed=9) * 5
    first = [turn(model, inputs, cache) for cache in (ours, theirs)]
    assert torch.equal(*first)
    again = followed(inputs, first[0], more)
    held = ours.get_seq_length()
    assert held == first[0].shape[1] - 1
    assert torch.equal(*(turn(model, again, cache) for cache in (ours, theirs)))
    ours.reset()
    assert ours.manager.stats()["blocks_used"] == 0
    assert torch.equal(turn(model, inputs, ours), first[0])


@pytest.mark.parametrize(("name", "columns"), [("llama", 30), ("llama", 12), ("llama", 8), ("gpt_oss", 3)])
def test_cropped_columns_are_computed_again(plain, cache_for, name, columns):
    """Within a block, over its border, and down to sequences that lose all their tokens."""
    model, inputs = plain(name), padded(random_prompts(5, longest=40))
    cache = cache_for(model)
    want = turn(model, inputs, cache)
    if name == "gpt_oss":  # a shorter sequence reads what its window of 16 still has, in the blocks that hold it
        cache.reset()
        start = {name: tensor[:, :16] for name, tensor in inputs.items()}
        positions = (start["attention_mask"].cumsum(1) - 1).clamp(min=0)  # as generate() counts them
        with torch.no_grad():
            model(**start, position_ids=positions, cache=cache)
    cache.crop(-columns)
    cache.manager.check_integrity()
    assert torch.equal(turn(model, inputs, cache), want)
    cache.crop(-cache.get_seq_length())
    assert cache.manager.stats()["blocks_used"] == 0


def test_a_crop_leaves_others_alone(plain, cache_for):
    """Blocks that another sequence shares, or that can be found, are copied before they are written."""
    model, inputs = plain("llama"), padded([random_prompts(1, longest=50, seed=2)[0]])
    cache = cache_for(model)
    cache.reuse(**inputs)
    with torch.no_grad():
        model(**inputs, cache=cache)
    width = cache.get_seq_length()
    kept = width // 16 * 16 - 3
    cache.crop(kept - width)
    other = torch.full((1, 30), 9)
    with torch.no_grad():
        model(other, attention_mask=torch.ones(1, kept + 30), cache=cache)
    cache.reset()
    assert cache.reuse(**inputs) == (width - 1) // 16 * 16
    assert torch.equal(turn(model, inputs, cache), model.generate(**inputs, **HOW))


def test_sequences_are_chosen_and_repeated(plain, cache_for):
    model, inputs = plain("gpt_oss"), padded(random_prompts(4))
    ours, theirs = cache_for(model), DynamicCache(config=model.config)
    logits = []
    for cache in (ours, theirs):
        with torch.no_grad():
            model(**inputs, cache=cache)
            cache.batch_select_indices(torch.tensor([2, 0, 2]))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([5, 4, 0, 1, 2, 3]))
            chosen = torch.tensor([2, 2, 2, 2, 0, 0])
            mask = torch.cat((inputs["attention_mask"][chosen], torch.ones(6, 1, dtype=torch.long)), 1)
            positions = mask.sum(1, keepdim=True) - 1
            ids = torch.tensor([[4], [5], [4], [6], [7], [7]])
            logits.append(model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert len(ours.manager.requests) == 4  # of sequence 2 those that went on with 4, 5 and 6; one of sequence 0
    ours.manager.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_prefixes_are_reused_where_the_caller_asks(plain, cache_for, name):
    model, cache = plain(name), cache_for(plain(name))
    start = random_prompts(1, longest=60, seed=4)[0][:48] * 2
    prompts = [start[:48] + p for p in random_prompts(4, longest=20, seed=8)]
    inputs = padded(prompts)
    want = model.generate(**inputs, **HOW)
    assert cache.reuse(**inputs) == 0
    assert torch.equal(turn(model, inputs, cache), want)
    cache.reset()
    assert torch.equal(turn(model, inputs, cache), want)  # nobody asked: all is computed
    assert cache.manager.stats()["prefix_hit_tokens"] == 0
    cache.reset()
    common = cache.reuse(**inputs)
    padding = (inputs["attention_mask"] == 0).sum(1)
    assert common == min(int(pad) + (len(p) - 1) // 16 * 16 for pad, p in zip(padding, prompts, strict=True))
    assert torch.equal(turn(model, inputs, cache), want)
    assert cache.manager.stats()["prefix_hit_tokens"] == sum((len(p) - 1) // 16 * 16 for p in prompts)
    cache.manager.check_integrity()
