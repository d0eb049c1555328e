"""The seam passes everything through but a `DSparkDraftModel`, and refuses early what cannot be lossless."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny_models import VOCAB, random_prompt, tiny_draft, tiny_llama
from transformers import BartConfig, BartForConditionalGeneration, GenerationMixin, MambaConfig, MambaForCausalLM

import hf_dspark.generation.seam as seam
from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.errors import DSparkDependencyError, DSparkGenerationError, DSparkTargetError

PROMPT = random_prompt(9)
GREEDY = dict(max_new_tokens=14, do_sample=False)
WRAPPED = ("_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding")


@pytest.fixture
def loop_entered(monkeypatch):
    """A list that grows when this package's loop or generator is used."""
    entered = []
    for name in ("DecodingLoop", "DSparkCandidateGenerator"):
        original = getattr(seam, name)
        monkeypatch.setattr(seam, name, lambda *a, _o=original, **k: (entered.append(1), _o(*a, **k))[1])
    return entered


def test_installing_twice_wraps_once():
    before = [getattr(GenerationMixin, name) for name in WRAPPED]
    seam.install()
    assert [getattr(GenerationMixin, name) for name in WRAPPED] == before
    for method in before:
        assert not hasattr(method.__wrapped__, "__wrapped__") or not getattr(method.__wrapped__, seam._WRAPPED, False)


@pytest.mark.parametrize("name", WRAPPED)
def test_signatures_are_kept(name):
    """The host inspects them (`inputs_tensor` is passed because the signature names it)."""
    method = getattr(GenerationMixin, name)
    assert inspect.signature(method) == inspect.signature(method.__wrapped__)
    assert method.__name__ == name


def test_an_unsupported_transformers_is_named(monkeypatch):
    monkeypatch.delattr(GenerationMixin, "_prefill")
    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", None)
    monkeypatch.setattr(seam.transformers, "__version__", "4.99.0")
    monkeypatch.setattr(seam.Cache, "crop", lambda self, maximum_length: None)
    with pytest.raises(DSparkDependencyError) as error:
        seam.check_transformers()
    for part in ("4.99.0", ">=5.24", "GenerationMixin._prefill", "Cache.crop(tokens_to_remove=)"):
        assert part in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Everything else behaves as if the package were not imported
# ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("choice", [{"do_sample": False}, {"do_sample": True}])
def test_ordinary_assistant(llama, loop_entered, choice):
    assistant = tiny_llama(num_hidden_layers=2)
    torch.manual_seed(0)
    out = llama.generate(PROMPT, assistant_model=assistant, max_new_tokens=14, **choice)
    torch.manual_seed(0)
    original = GenerationMixin._assisted_decoding
    try:
        GenerationMixin._assisted_decoding = original.__wrapped__
        expected = llama.generate(PROMPT, assistant_model=assistant, max_new_tokens=14, **choice)
    finally:
        GenerationMixin._assisted_decoding = original
    assert torch.equal(out, expected)
    if not choice["do_sample"]:
        assert torch.equal(out, llama.generate(PROMPT, **GREEDY))
    assert not loop_entered


def test_prompt_lookup(llama, loop_entered):
    prompt = torch.cat([PROMPT, PROMPT], dim=1)
    out = llama.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(out, llama.generate(prompt, **GREEDY))
    assert not loop_entered


def test_assistant_early_exit_and_plain_are_untouched(llama, loop_entered):
    llama.generate(PROMPT, **GREEDY)
    llama.generate(PROMPT, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    llama.generate(PROMPT, max_new_tokens=4, num_beams=2, do_sample=False)
    assert not loop_entered


def test_custom_generate(llama, loop_entered):
    def custom(model, input_ids, **kwargs):
        return input_ids[:, :3]

    out = llama.generate(PROMPT, assistant_model=tiny_draft(llama), custom_generate=custom, **GREEDY)
    assert torch.equal(out, PROMPT[:, :3])
    assert not loop_entered


def test_encoder_decoder_pair(loop_entered):
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        forced_eos_token_id=None,
    )
    model, assistant = BartForConditionalGeneration(config).eval(), BartForConditionalGeneration(config).eval()
    prompt = random_prompt(7, vocab_size=40).clamp(min=5)
    out = model.generate(prompt, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, model.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=1))
    assert not loop_entered


def test_beams_are_left_to_the_host(llama, loop_entered):
    out = llama.generate(PROMPT, assistant_model=tiny_draft(llama), num_beams=3, **GREEDY)
    assert torch.equal(out, llama.generate(PROMPT, num_beams=3, **GREEDY))
    assert not loop_entered


# ----------------------------------------------------------------------------------------------------------------------
# Refused before anything is computed
# ----------------------------------------------------------------------------------------------------------------------
REFUSED = {
    "ensemble": ({"assistant_ensemble_weight": 0.5}, DSparkGenerationError, "assistant_ensemble_weight is 0.5"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, DSparkGenerationError, "prompt_lookup_num_tokens=3"),
    "early exit": ({"assistant_early_exit": 2}, DSparkGenerationError, "assistant_early_exit=2"),
    "mtp": ({"use_mtp": True}, DSparkGenerationError, "use_mtp=True"),
    "length": ({"num_assistant_tokens": -1}, DSparkGenerationError, "num_assistant_tokens is -1"),
    "threshold": ({"assistant_confidence_threshold": 1.5}, DSparkGenerationError, "threshold is 1.5"),
}


@pytest.mark.parametrize("arguments, error, message", REFUSED.values(), ids=REFUSED)
def test_refused_by_name(llama, arguments, error, message):
    draft, forwards = tiny_draft(llama), []
    handle = llama.register_forward_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(error, match=message) as caught:
            llama.generate(PROMPT, assistant_model=draft, **{**GREEDY, **arguments})
    finally:
        handle.remove()
    assert not forwards and draft.last_stats is None
    assert len(str(caught.value).splitlines()) == 1


def test_threshold_without_a_confidence_head(llama):
    draft = tiny_draft(llama, enable_confidence_head=False)
    with pytest.raises(DSparkGenerationError, match="no confidence head"):
        llama.generate(PROMPT, assistant_model=draft, assistant_confidence_threshold=0.5, **GREEDY)


def test_recurrent_target(llama):
    torch.manual_seed(0)
    target = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4))
    with pytest.raises(DSparkTargetError, match="MambaForCausalLM keeps a recurrent state"):
        target.generate(PROMPT, assistant_model=tiny_draft(llama), **GREEDY)


def test_encoder_decoder_target(llama):
    config = BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(DSparkTargetError, match="BartForConditionalGeneration is an encoder-decoder"):
        BartForConditionalGeneration(config).generate(PROMPT, assistant_model=tiny_draft(llama), **GREEDY)


def test_wrong_pair(llama):
    draft = tiny_draft(llama)
    with pytest.raises(DSparkTargetError, match=r"vocab_size 50 \(the draft was made for 61\)"):
        tiny_llama(vocab_size=50).generate(PROMPT.clamp(max=49), assistant_model=draft, **GREEDY)


def test_a_target_that_hands_out_other_states(monkeypatch):
    """The first prefill proves that `hidden_states[i + 1]` is what layer i returned."""
    import hf_dspark.generation.capture as capture

    class ShiftedLlama(type(tiny_llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if output.hidden_states is not None:
                states = list(output.hidden_states)
                states[1] = states[1] + 1
                output["hidden_states"] = tuple(states)
            return output

    good = tiny_llama()
    target = ShiftedLlama(good.config)
    target.load_state_dict(good.state_dict())
    with pytest.raises(DSparkTargetError, match="decoder layer 0"):
        target.eval().generate(PROMPT, assistant_model=tiny_draft(target), **GREEDY)
    assert not capture._proved.get(ShiftedLlama)


def test_binds_at_the_first_generate(llama):
    draft = DSparkDraftModel(DSparkConfig.for_target(llama.config, num_hidden_layers=1, target_layer_ids=[0, 2])).eval()
    assert torch.equal(llama.generate(PROMPT, assistant_model=draft, **GREEDY), llama.generate(PROMPT, **GREEDY))
    assert draft.target is llama and sum(draft.last_stats.proposed) > 0
