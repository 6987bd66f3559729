"""Facts of real models: bytes per token by hand arithmetic, page bytes out of published logs, real files."""

from collections import Counter
from pathlib import Path

import pytest
from cache_facts import config_of, fact_files
from real_configs import REAL

from kvcore.errors import ConfigError, ModelError
from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts
from kvcore.settings.cache import CacheSettings
from kvcore.spec.cache_spec import CacheId

DATA = Path(__file__).parents[1] / "data"
GEOMETRY = [facts for facts in fact_files() if "derived_all_attn_layers_full_length" in facts]


def facts(config, **options):
    return model_facts(config, dtype="bfloat16", **options)


def attention(found):
    """The caches that hand arithmetic counts: those of attention itself, shared ones included."""
    return [c for c in found.caches if c.cache_id.role == "self"]


@pytest.mark.parametrize("case", GEOMETRY, ids=[case["name"] for case in GEOMETRY])
def test_bytes_per_token_by_hand(case):
    caches, by_hand = attention(facts(config_of(case))), case["derived_all_attn_layers_full_length"]
    assert len(caches) == by_hand["attn_layers"]
    assert sum(c.spec.content.bytes_per_token for c in caches) == by_hand["bytes_per_token_bf16"]
    assert {c.spec.content.kind for c in caches} == {{"kv": "kv", "mla": "latent"}[by_hand["kind"]]}


def test_all_fact_files_are_read():
    cases = fact_files()
    for case in cases:
        found = facts(config_of(case))
        assert found.caches
        # One file lists no layers; the class's own four are told to be an assumption.
        assert ("nemotron-3-ultra" in case["name"]) == any("num_hidden_layers 4" in note for note in found.notes)
    assert len(cases) == 85


def real(name):
    return read_config(DATA / "hf_configs" / f"{name}_config.json")


def kinds(found):
    return Counter(c.spec.kind for c in attention(found))


def test_gpt_oss():
    found = facts(real("openai--gpt-oss-120b"))
    assert kinds(found) == {"window": 18, "full": 18}
    assert found.queries[CacheId(0)].mask.window == 128
    assert found.queries[CacheId(1)].mask.window is None
    assert all(q.sinks and q.head_dim == 64 for q in found.queries.values())
    assert [r.field for r in found.refusals] == ["quantization_config"]


def test_llama4():
    found = facts(real("meta-llama--Llama-4-Scout-17B-16E-Instruct"))
    assert kinds(found) == {"chunk": 36, "full": 12}
    assert [c.layer for c, q in found.queries.items() if q.mask.chunk is None] == list(range(3, 48, 4))
    assert found.queries[CacheId(0)].mask.chunk == 8192


def test_gemma4_has_two_geometries():
    found = facts(real("google--gemma-4-26B-A4B"))
    assert kinds(found) == {"window": 25, "full": 5}
    window, full = found.queries[CacheId(0)], found.queries[CacheId(5)]
    assert (window.num_kv_heads, window.head_dim, window.mask.window) == (8, 256, 1024)
    assert (full.num_kv_heads, full.head_dim, full.mask.window) == (2, 512, None)
    assert window.scale == full.scale == 1.0


def test_mimo_has_two_geometries():
    found = facts(real("XiaomiMiMo--MiMo-V2-Flash"))
    full, window = found.queries[CacheId(0)], found.queries[CacheId(1)]
    assert (full.num_kv_heads, full.head_dim, full.head_dim_v, full.sinks) == (4, 192, 128, False)
    assert (window.num_kv_heads, window.head_dim, window.head_dim_v, window.sinks) == (8, 192, 128, True)
    assert kinds(found) == {"full": 9, "window": 39}


def test_deepseek_latent_and_expanded():
    config = real("deepseek-ai--DeepSeek-V3")
    latent = facts(config).caches[0]
    assert latent.spec.content.bytes_per_token == (512 + 64) * 2
    assert (latent.query.num_heads, latent.query.num_kv_heads) == (128, 1)
    assert (latent.query.head_dim, latent.query.head_dim_v) == (576, 512)
    expanded = facts(config, cache=CacheSettings(mla="expanded")).caches[0]
    assert expanded.spec.content.bytes_per_token == 128 * (192 + 128) * 2
    # yarn: (0.1 * ln 40 + 1) squared times 192 ** -0.5
    assert latent.query.scale == expanded.query.scale == pytest.approx(0.1352337788608801)


def test_sparse_indexers_own_keys():
    found = facts(real("deepseek-ai--DeepSeek-V3.2"))
    indexers = [c for c in found.caches if c.cache_id.role == "indexer"]
    assert len(indexers) == 61
    # What engines store: 128 elements in fp8 and one float32 scale.
    assert all(c.spec.content.bytes_per_token == 132 and c.query is None for c in indexers)
    listed = real("zai-org--GLM-5.2")["indexer_types"]
    glm = facts(real("zai-org--GLM-5.2"))
    assert [c.cache_id.layer for c in glm.caches if c.cache_id.role == "indexer"] == [
        i for i, kind in enumerate(listed) if kind == "full"
    ]


@pytest.mark.parametrize(
    ("config", "page_bytes"),
    [
        # Bytes of one Mamba page in published engine logs (planner_cases.jsonl, log58 and log60).
        (real("Qwen--Qwen3.5-27B"), 3_207_168),
        (
            {
                "model_type": "zamba2",
                "hidden_size": 2560,
                "num_hidden_layers": 54,
                "num_attention_heads": 32,
                "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "n_mamba_heads": 8,
                "mamba_ngroups": 1,
            },
            686_848,
        ),
    ],
)
def test_state_bytes_of_published_logs(config, page_bytes):
    states = [c for c in facts(config).caches if c.spec.kind == "state"]
    assert {c.spec.content.bytes_per_request for c in states} == {page_bytes}


def test_kimi_k3_mixes_states_and_latents():
    found = facts(real("moonshotai--Kimi-K3"))
    assert kinds(found) == {"latent": 24}
    states = [c.spec.content for c in found.caches if c.spec.kind == "state"]
    assert len(states) == 69
    assert states[0].shapes == ((3 * 96 * 128, 3), (96, 128, 128))


def test_nemotron_layers_without_caches():
    found = facts(real("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))
    assert (found.num_layers, len(found.caches)) == (52, 29)
    assert found.caches[0].spec.content.dtypes == ("bfloat16", "float32")


def test_whisper_owns_two_caches_a_layer():
    config = {
        "model_type": "whisper",
        "d_model": 384,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "encoder_layers": 4,
        "num_hidden_layers": 4,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 51865,
        "is_encoder_decoder": True,
    }
    found = facts(config)
    assert found.max_model_len == 448
    assert [str(c.cache_id) for c in found.caches[:2]] == ["L0", "L0.cross"]
    assert found.caches[1].spec.retention.max_tokens == 1500
    assert not found.caches[1].query.mask.causal
    assert found.refusals


def test_gemma3n_shares_caches():
    config = {
        "model_type": "gemma3n_text",
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    }
    found = facts(config)
    assert len(found.owned) == 20
    # Layers 18 and 19 are the last of their kinds before the shared ones.
    assert {s.layer for s in found.shared.values()} == {18, 19}
    assert found.shared[CacheId(34)] == CacheId(19)


def test_cache_choices():
    config = real("google--gemma-4-26B-A4B")
    choice = CacheSettings(dtype="fp8_e4m3", dtype_by_kind={"full": "int8"})
    found = facts(config, cache=choice)
    window, full = found.caches[0], found.caches[5]
    assert (window.query.cache_dtype, window.query.quant) == ("fp8_e4m3", "tensor")
    assert (full.query.cache_dtype, full.query.quant) == ("int8", "token_head")
    assert full.spec.content.bytes_per_token == 2 * 2 * (512 + 4)
    with pytest.raises(ConfigError, match=r"cache\.dtype"):  # checked where it is made
        facts(config, cache=CacheSettings(dtype="int32"))
    with pytest.raises(ModelError, match="one scale"):
        facts(real("deepseek-ai--DeepSeek-V3"), cache=CacheSettings(dtype="int8"))
    with pytest.raises(ConfigError, match=r"cache\.mla"):
        facts(real("deepseek-ai--DeepSeek-V3"), cache=CacheSettings(mla="squeezed"))


def test_dtype_follows_the_checkpoint_unless_asked():
    config = real("meta-llama--Meta-Llama-3.1-8B")
    assert model_facts(config).dtype == "bfloat16"
    assert model_facts(config, dtype="float16").dtype == "float16"
    assert model_facts({**config, "torch_dtype": "torch.float32"}).dtype == "float32"
    silent = {k: v for k, v in config.items() if "dtype" not in k}
    assert (model_facts(silent).dtype, len(model_facts(silent).notes)) == ("float32", 1)
    with pytest.raises(ModelError):
        model_facts(config, dtype="float8")


def test_deepseek_v4_compresses():
    config = real("deepseek-ai--DeepSeek-V4-Flash")
    found = facts(config)
    ratios = config["compress_ratios"][:43]
    by_role = Counter(c.cache_id.role for c in found.caches)
    sparse, heavy = ratios.count(4), ratios.count(128)
    assert by_role == {
        "self": 43,
        "compressed": sparse + heavy,
        "compressor": sparse + heavy,
        "indexer": sparse,
        "index_compressor": sparse,
    }
    window = found.caches[0].spec
    assert (window.kind, window.retention.size, window.content.bytes_per_token) == ("latent", 128, 512 * 2)
    # 1,024 bytes for 4 tokens or 128, and 132 bytes of an indexer's key for 4.
    later = [c.spec for c in found.caches if c.cache_id.role in ("compressed", "indexer")]
    assert sum(s.bytes_per_token for s in later) == sparse * (1024 / 4 + 132 / 4) + heavy * 1024 / 128
    # Waiting tokens: keys and gates of a run, twice as wide where runs overlap, and half of the run before.
    states = {c.spec.content.bytes_per_request for c in found.caches if c.cache_id.role == "compressor"}
    assert states == {2 * 2 * (4 * 1024 + 4 * 512), 2 * 2 * 128 * 512}
    assert found.refusals
    listed = {k: v for k, v in config.items() if k != "compress_ratios"}
    with pytest.raises(ModelError, match="compress_ratios"):
        facts({**listed, "compress_ratios": [8] * 43})
    with pytest.raises(ModelError, match="disagree"):
        facts({**config, "layer_types": ["sliding_attention"] * 43})


def test_all_real_configs_are_read():
    for file in REAL:
        found = facts(read_config(file))
        assert found.caches
        assert found.max_model_len > 1000
    assert len(REAL) in (54, 55)
