"""`DSparkConfig`: strict values, round trips, and configurations made for a target."""

from __future__ import annotations

import pytest
from tiny_models import TARGETS, tiny_gemma4, tiny_llama
from transformers import AutoConfig, BartConfig, CohereConfig, GraniteConfig

from hf_dspark import DSparkConfig, DSparkError
from hf_dspark.configuration_dspark import evenly_spaced_layer_ids
from hf_dspark.errors import DSparkConfigError

SMALL = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_target_layers=6,
    target_layer_ids=[0, 2, 4],
    markov_rank=8,
)


def small(**changes):
    return DSparkConfig(**{**SMALL, **changes})


# field → wrong value, a part of the message
WRONG = [
    ("vocab_size", 0, "at least 1"),
    ("num_hidden_layers", 0, "at least 1"),
    ("num_key_value_heads", 3, "divisor of num_attention_heads"),
    ("backbone", "mamba", "one of"),
    ("layer_types", ["sliding_attention"] * 2, "full_attention"),
    ("layer_types", ["full_attention"], "2 times"),
    ("sliding_window", 16, "None"),
    ("block_size", 0, "at least 1"),
    ("mask_token_id", 50, "inside the embedding, 0 to 49"),
    ("mask_token_id", -1, "inside the embedding"),
    ("target_layer_ids", [], "at least one layer id"),
    ("target_layer_ids", [0, 5], "final layer"),
    ("target_layer_ids", [0, 6], "from -1"),
    ("target_layer_ids", [-2, 0], "from -1"),
    ("target_layer_ids", [2, 0], "ascending"),
    ("target_layer_ids", [2, 2], "ascending"),
    ("markov_rank", -1, "0 .no sequential head. or more"),
    ("markov_head_type", "lstm", "one of"),
    ("draft_vocab_size", 51, "from 1 to vocab_size"),
    ("draft_vocab_size", 0, "from 1 to vocab_size"),
    ("final_logit_softcapping", 0.0, "positive"),
    ("logit_scale", 0.0, "positive"),
    ("confidence_temperatures", {"greedy": [1.0]}, "7 positive finite numbers"),
    ("confidence_temperatures", {"greedy": [1.0] * 6 + [-1.0]}, "positive finite numbers"),
    ("confidence_temperatures", {"greedy": [1.0] * 6 + [0]}, "positive finite numbers"),
    ("confidence_temperatures", {"greedy": [1.0] * 6 + [float("inf")]}, "positive finite numbers"),
    ("confidence_temperatures", {"sample": [1.0] * 6 + [float("nan")]}, "positive finite numbers"),
    ("confidence_temperatures", {"sample": ["1.0"] * 7}, "positive finite numbers"),
    ("confidence_temperatures", {"sample": 1.0}, "positive finite numbers"),
    ("confidence_shifts", {"sample": [0.0] * 6}, "7 finite numbers"),
    ("confidence_shifts", {"sample": [-1.0] * 6 + [float("nan")]}, "finite numbers"),
    ("confidence_temperatures", {"hot": [1.0] * 7}, "'greedy' and 'sample'"),
    ("confidence_calibration", {"hot": {}}, "'greedy' and 'sample'"),
    ("confidence_calibration", {"greedy": 2000}, "each a dict"),
    ("tie_word_embeddings", True, "never ties"),
    ("global_head_dim", 16, "None with backbone 'qwen3'"),
    ("attention_k_eq_v", True, "False with backbone 'qwen3'"),
]


@pytest.mark.parametrize("field, value, message", WRONG, ids=[f"{field}={value}" for field, value, _ in WRONG])
def test_wrong_values_are_refused_by_name(field, value, message):
    with pytest.raises(DSparkConfigError, match=message) as error:
        small(**{field: value})
    assert f"`{field}`" in str(error.value) and isinstance(error.value, (DSparkError, ValueError))


def test_wrong_combinations_are_refused():
    with pytest.raises(DSparkConfigError, match="block_size"):
        small(block_size=1, sample_from_anchor=False)
    with pytest.raises(DSparkConfigError, match="no Markov embedding"):
        small(markov_rank=0, confidence_head_with_markov=True)
    with pytest.raises(DSparkConfigError, match="enable_confidence_head"):
        small(enable_confidence_head=False, confidence_head_with_markov=True)


def test_a_file_with_wrong_values_is_refused(tmp_path):
    config = small()
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vanilla"', '"rotten"'))
    with pytest.raises(DSparkConfigError, match="markov_head_type"):
        AutoConfig.from_pretrained(tmp_path)


def test_defaults():
    config = small(target_layer_ids=None, num_target_layers=36)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.head_dim == 8 and config.target_hidden_size == 32
    assert config.mask_token_id == 49 and config.draft_vocab_size == 50
    assert config.confidence_head_with_markov and not small(markov_rank=0).confidence_head_with_markov
    assert config.num_draft_tokens == 7 and small(sample_from_anchor=False).num_draft_tokens == 6


def test_layer_ids_never_reach_the_final_layer():
    for layers in range(2, 80):
        for count in range(1, 7):
            ids = evenly_spaced_layer_ids(layers, count)
            assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < layers - 1


def test_round_trip_through_auto_config(tmp_path):
    calibrated = dict(
        confidence_temperatures={"greedy": [1.5] * 7},
        confidence_calibration={"greedy": {"blocks": 2000, "data": ["a"]}},
    )
    config = small(**calibrated, training_max_length=512, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is DSparkConfig
    ours, theirs = config.to_dict(), again.to_dict()
    assert {**ours, "_name_or_path": None} == {**theirs, "_name_or_path": None}


@pytest.mark.parametrize("name", TARGETS)
def test_for_target_follows_the_target(name):
    target = TARGETS[name]()
    text = target.config.get_text_config()
    config = DSparkConfig.for_target(target.config, num_hidden_layers=2, block_size=4)
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"):
        assert getattr(config, field) == getattr(text, field)
    assert config.num_target_layers == text.num_hidden_layers
    assert config.num_hidden_layers == 2 == len(config.layer_types) and config.block_size == 4
    assert config.backbone == ("gemma4" if name == "gemma4" else "qwen3")
    assert config.final_logit_softcapping == (30.0 if name == "gemma4" else None)


def test_for_target_of_gemma4_takes_the_full_layers_sizes():
    target = tiny_gemma4(
        global_head_dim=16, head_dim=8, num_global_key_value_heads=1, num_key_value_heads=2, attention_k_eq_v=True
    )
    config = DSparkConfig.for_target(target.config)
    assert config.head_dim == config.global_head_dim == 16
    assert config.num_draft_key_value_heads == 1 and config.attention_k_eq_v
    ordinary = DSparkConfig.for_target(tiny_gemma4(global_head_dim=16, num_global_key_value_heads=1).config)
    assert ordinary.num_draft_key_value_heads == 2


def test_for_target_special_ids():
    config = tiny_llama(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=5).config
    draft = DSparkConfig.for_target(config)
    assert (draft.bos_token_id, draft.eos_token_id, draft.pad_token_id) == (1, [2, 3], 5)
    assert draft.mask_token_id == 5  # pad is free to be the mask where it is no eos
    config = tiny_llama(eos_token_id=2, pad_token_id=2).config
    assert DSparkConfig.for_target(config).mask_token_id == 60


def test_for_target_logit_scale():
    common = dict(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    assert DSparkConfig.for_target(CohereConfig(logit_scale=0.25, **common)).logit_scale == 0.25
    assert DSparkConfig.for_target(GraniteConfig(logits_scaling=8.0, **common)).logit_scale == 0.125


def test_for_target_refusals():
    with pytest.raises(DSparkConfigError, match="encoder-decoder"):
        DSparkConfig.for_target(BartConfig())
    with pytest.raises(DSparkConfigError, match=r"no field \['blok_size'\]"):
        DSparkConfig.for_target(tiny_llama().config, blok_size=3)
