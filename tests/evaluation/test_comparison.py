import pytest
import torch

from hf_dspark.evaluation.comparison import (
    DIFFERENT,
    TIE,
    compare_greedy,
    first_difference,
    label_divergence,
    ulp,
)

INPUTS = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (25.6, torch.bfloat16, 0.125),
        (-25.6, torch.bfloat16, 0.125),
        (16.0, torch.bfloat16, 0.125),
        (15.9, torch.bfloat16, 0.0625),
        (1.0, torch.float16, 2**-10),
        (1.0, torch.float32, 2**-23),
    ],
)
def test_ulp_is_the_spacing_of_the_dtype(value, dtype, expected):
    assert ulp(value, dtype) == expected
    number = torch.tensor(abs(value), dtype=dtype)
    assert (torch.nextafter(number.float(), torch.tensor(float("inf"))) - number).item() <= expected


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_a_tie_is_judged_by_the_token_that_was_taken():
    scores = torch.tensor([20.0, 19.875, 19.75, 19.625, 1.0])  # bf16 spacing at 20: 0.125
    assert label_divergence(scores, 1, torch.bfloat16) == (TIE, 20.0, 19.875, 19.875)
    assert label_divergence(scores, 2, torch.bfloat16)[0] == TIE
    # The two best are close, but the other run took neither: no tie explains that.
    assert label_divergence(scores, 3, torch.bfloat16)[0] == DIFFERENT
    assert label_divergence(scores, 4, torch.bfloat16)[0] == DIFFERENT
    assert label_divergence(scores, 1, torch.float32)[0] == DIFFERENT


def test_a_wrong_token_is_found_with_the_scores_of_the_plain_run(target):
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    output = target.generate(**INPUTS, **kwargs, return_dict_in_generate=True, output_logits=True)
    plain = output.sequences[0, 4:].tolist()
    assert compare_greedy(target, INPUTS, plain, plain, **kwargs) is None
    wrong = [*plain[:5], (plain[5] + 1) % 48, *plain[6:]]
    found = compare_greedy(target, INPUTS, plain, wrong, **kwargs)
    top = output.logits[5][0].topk(2).values.tolist()
    assert (found.position, found.plain_token, found.draft_token) == (5, plain[5], wrong[5])
    assert (found.top1, found.top2) == pytest.approx(top)
    assert found.gap == pytest.approx(top[0] - top[1])
    assert found.label == DIFFERENT and str(found).startswith("DIFFERENT at new token 5 (top-2 gap")


def test_a_text_that_stops_early_is_different(target):
    found = compare_greedy(target, INPUTS, [1, 2, 3], [1, 2], max_new_tokens=3, do_sample=False)
    assert (found.position, found.label, found.gap) == (2, DIFFERENT, None)
    assert "ends there" in str(found)
