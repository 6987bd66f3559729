"""What a `PagedCache` of transformers does not serve is refused by name, and a model is what it was before."""

from __future__ import annotations

import pytest
import torch
from support.tiny_transformers import padded, random_prompts
from transformers import T5Config, T5ForConditionalGeneration, masking_utils

from kvcore.engine.settings import SamplingParams
from kvcore.errors import BackendUnavailableError, ConfigError, IntegrityError, KVCoreError, ModelError, NotBuiltError

INPUTS = padded(random_prompts(3, longest=20))
HOW = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SIZE, WIDTH = INPUTS["input_ids"].shape
CALLS = {
    "padding on the right": ({"attention_mask": INPUTS["attention_mask"].flip(1)}, "attention_mask"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(SIZE, 1, WIDTH, WIDTH)}, "attention_mask"),
    "masks by layer type": ({"attention_mask": {"full_attention": None}}, "attention_mask"),
    "a mask of other columns": ({"attention_mask": torch.ones(SIZE, WIDTH + 1)}, "attention_mask"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(SIZE, WIDTH, 64)}, "inputs_embeds"),
    "no use of the cache": ({"use_cache": False}, "use_cache"),
    "weights of attention": ({"output_attentions": True}, "output_attentions"),
    "more sequences than planned": ({"input_ids": torch.ones(17, 2), "attention_mask": None}, "engine.max_num_seqs"),
    "longer than planned": ({"input_ids": torch.ones(1, 257), "attention_mask": None}, "engine.max_model_len"),
    "more tokens than planned": (
        {"input_ids": torch.ones(16, 200), "attention_mask": None},
        "engine.max_num_batched_tokens",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_is_refused_before_anything_changes(plain, cache_for, what):
    model, (given, field) = plain("llama"), CALLS[what]
    cache = cache_for(model)
    with pytest.raises(ConfigError) as caught, torch.no_grad():
        model(**INPUTS | given, cache=cache)
    assert caught.value.field == field
    assert torch.equal(model.generate(**INPUTS, **HOW, cache=cache), model.generate(**INPUTS, **HOW))


def test_training_gradients_and_compilation_are_refused(plain, cache_for):
    model = plain("llama")
    cache = cache_for(model)
    with pytest.raises(IntegrityError, match="gradients"):
        model(**INPUTS, cache=cache)
    cache.reset()
    try:
        with pytest.raises(ConfigError, match="training"):
            model.train()(**INPUTS, cache=cache)
    finally:
        model.eval()
    with pytest.raises(Exception, match=r"torch.compile") as caught, torch.no_grad():
        torch.compile(model, backend="eager")(**INPUTS, cache=cache)
    assert "a PagedCache does not serve this call" in str(caught.value)


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": "itself"}])
def test_assisted_decoding_is_refused(plain, cache_for, how):
    model, inputs = plain("llama"), {k: v[:1] for k, v in INPUTS.items()}
    how = {k: model if v == "itself" else v for k, v in how.items()}
    with pytest.raises(NotBuiltError, match="assisted"):
        model.generate(**inputs, **HOW, **how, cache=cache_for(model))


def test_models_are_refused(plain, cache_for):
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    with pytest.raises(NotBuiltError, match="cross attention"):
        cache_for(T5ForConditionalGeneration(T5Config(**small)))
    with pytest.raises(KVCoreError, match="recurrent"):
        cache_for(plain("mamba"))
    with pytest.raises(ConfigError, match="does not say"):
        cache_for(torch.nn.Linear(2, 2))


def test_a_cache_serves_the_model_that_it_was_made_for(plain, cache_for):
    llama, mistral = plain("llama"), plain("mistral_window")
    cache = cache_for(llama)
    cache_for(mistral)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="another model"):
            mistral(**INPUTS, cache=cache)
        with pytest.raises(IntegrityError, match="outside a pass"):
            llama.model(**INPUTS, cache=cache)
        llama(**INPUTS, cache=cache)
        with pytest.raises(ConfigError, match="another number of sequences"):
            llama(input_ids=torch.ones(2, 1, dtype=torch.long), cache=cache)
        other = torch.ones(SIZE, WIDTH + 1)
        with pytest.raises(ConfigError, match="another past"):
            llama(input_ids=torch.ones(SIZE, 1, dtype=torch.long), attention_mask=other, cache=cache)


def test_a_failed_pass_must_be_reset(plain, cache_for):
    model = plain("llama")
    cache = cache_for(model, cache={"num_blocks": 5}, engine={"max_model_len": 64, "max_num_seqs": 16})
    with pytest.raises(KVCoreError, match="lacks"):
        model.generate(**padded(random_prompts(12)), **HOW, cache=cache)
    with pytest.raises(IntegrityError, match="did not finish"):
        model.generate(**INPUTS, **HOW, cache=cache)
    cache.reset()
    few = padded(random_prompts(1, longest=20))
    assert torch.equal(model.generate(**few, **HOW, cache=cache), model.generate(**few, **HOW))
    cache.manager.check_integrity()


def test_an_error_of_the_model_leaves_no_trace(plain, cache_for, monkeypatch):
    model = plain("llama")
    cache = cache_for(model)
    cache.reuse(**INPUTS)
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(**INPUTS, cache=cache)
    monkeypatch.undo()
    assert model.config._attn_implementation == "sdpa"
    cache.reset()
    cache.manager.check_integrity()
    assert cache.manager.stats()["blocks_cached"] == 0
    assert torch.equal(model.generate(**INPUTS, **HOW, cache=cache), model.generate(**INPUTS, **HOW))


def test_a_model_that_hides_a_layer_is_found_out(plain, cache_for, monkeypatch):
    model = plain("llama")
    cache = cache_for(model)
    monkeypatch.setattr(model.config, "num_hidden_layers", 1)
    with pytest.raises(ModelError, match="calls by layer"), torch.no_grad():
        model(**INPUTS, cache=cache)


def test_what_was_reused_must_be_what_is_computed(plain, cache_for):
    model, inputs = plain("llama"), padded([[5] * 40, [6] * 33])
    cache = cache_for(model)
    cache.reuse(**inputs)
    with torch.no_grad():
        model(**inputs, cache=cache)
    with pytest.raises(IntegrityError, match="a batch is in this cache"):
        cache.reuse(**inputs)
    for change, error in ((0, NotBuiltError), (1, ConfigError)):
        cache.reset()
        found = cache.reuse(**inputs)
        assert found == 32
        with pytest.raises(error), torch.no_grad():
            model(inputs["input_ids"][:, found:] + change, attention_mask=inputs["attention_mask"], cache=cache)


def test_crop_says_what_it_cannot_do(plain, cache_for):
    model = plain("mistral_window")
    cache = cache_for(model, cache={"num_blocks": 40, "prefix_caching": False})
    with torch.no_grad():
        model(torch.full((1, 60), 3), cache=cache)
    before = cache.manager.stats()["blocks_used"]
    for wrong in (1, -61):
        with pytest.raises(ConfigError, match="crop"):
            cache.crop(wrong)
    with pytest.raises(NotBuiltError, match="window has let go"):
        cache.crop(-20)
    assert (cache.get_seq_length(), cache.manager.stats()["blocks_used"]) == (60, before)
    cache.manager.check_integrity()


def test_an_overlay_on_the_mask_is_refused():
    from kvcore_transformers.attention import no_mask

    assert no_mask(batch_size=1, attention_mask=torch.ones(1, 3)) is None
    for overlay in ({"use_vmap": True}, {"allow_is_causal_skip": False}):
        with pytest.raises(ConfigError, match="lays a mask"):
            no_mask(**overlay)


def test_another_version_of_transformers_is_refused_by_name(monkeypatch):
    from kvcore_transformers.versions import require_versions

    require_versions()
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda attention_mask: None)
    with pytest.raises(BackendUnavailableError, match="sdpa_mask"):
        require_versions()


def test_our_own_engine_lives_in_the_same_process(plain, cache_for, tmp_path_factory):
    from models.tiny import tiny_model
    from support.engines import make_llm

    model, prompt = plain("llama"), [5, 9, 200, 31, 7] * 4
    want = model.generate(torch.tensor([prompt]), **HOW)[0, len(prompt) :].tolist()
    for _ in range(2):
        llm = make_llm(tiny_model("llama", tmp_path_factory.getbasetemp()), num_blocks=40)
        request = llm.core.add_request("a", prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        while llm.core.has_unfinished:
            llm.core.step()
        assert request.output_ids == want
        ours = model.generate(torch.tensor([prompt]), **HOW, cache=cache_for(model))
        assert ours[0, len(prompt) :].tolist() == want
