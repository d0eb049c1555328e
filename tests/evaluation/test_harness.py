import dataclasses
import json

import pytest
from tiny_pair import tiny_draft

from hf_dspark.errors import DSparkConfigError
from hf_dspark.evaluation import harness
from hf_dspark.evaluation.harness import EvaluationSettings, PromptResult, evaluate
from hf_dspark.evaluation.partial import PartialResults, fingerprint
from hf_dspark.evaluation.prompts import PromptSet

SETS = [
    PromptSet(name, [[{"role": "user", "content": f"w{i + j}"}] for i in range(3)]) for j, name in ((3, "a"), (9, "b"))
]
SETTINGS = EvaluationSettings(max_new_tokens=10, temperatures=(0.0, 1.0))


@pytest.fixture
def drafts(target, draft):
    return {"one": draft, "two": tiny_draft(target, seed=2, markov_rank=0)}


def test_every_prompt_runs_plain_and_with_each_draft_in_turning_order(target, tokenizer, drafts):
    evaluation = evaluate(target, tokenizer, drafts, SETS, SETTINGS)
    assert len(evaluation.prompt_results) == 2 * 2 * 3
    orders = [[run.name for run in result.runs] for result in evaluation.prompt_results[:3]]
    assert orders == [["plain", "one", "two"], ["one", "two", "plain"], ["two", "plain", "one"]]
    assert [(r.temperature, r.prompt_set, r.draft) for r in evaluation.set_results] == [
        (t, s, d) for t in (0.0, 1.0) for s in ("a", "b") for d in ("one", "two")
    ]
    for result in evaluation.set_results:
        assert result.summary.prompts == 3
        assert result.summary.proposed_per_round > 0
        assert result.identical == (3 if result.temperature == 0 else None)
        assert (result.ties, result.different) == (0, 0)
    assert evaluation.failures == []
    averages = evaluation.averages()
    assert [(row["temperature"], row["draft"]) for row in averages] == [(0, "one"), (0, "two"), (1, "one"), (1, "two")]
    values = evaluation.to_dict()
    assert set(values) == {"sets", "averages", "divergences", "prompts"}
    again = [PromptResult.from_dict(row) for row in json.loads(json.dumps(values["prompts"]))]
    assert again == evaluation.prompt_results


def wrong_in_draft_runs(timed_generate):
    def run(target, inputs, draft, *args, **kwargs):
        made = timed_generate(target, inputs, draft, *args, **kwargs)
        if draft is not None:
            made.tokens[4] = (made.tokens[4] + 1) % 48
        return made

    return run


def test_another_text_is_reported_and_fails(target, tokenizer, drafts, monkeypatch):
    monkeypatch.setattr(harness, "timed_generate", wrong_in_draft_runs(harness.timed_generate))
    settings = dataclasses.replace(SETTINGS, temperatures=(0.0,))
    evaluation = evaluate(target, tokenizer, drafts, SETS[:1], settings)
    assert [result.different for result in evaluation.set_results] == [3, 3]
    assert len(evaluation.failures) == 6
    assert evaluation.failures[0].startswith("one, a prompt 0: DIFFERENT at new token 4 (top-2 gap")
    assert [row["position"] for row in evaluation.to_dict()["divergences"]] == [4] * 6


def test_a_draft_that_never_proposes_fails(target, tokenizer, draft, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of order")

    monkeypatch.setattr(type(draft), "start_block", refuse)
    settings = dataclasses.replace(SETTINGS, temperatures=(0.0,))
    failures = evaluate(target, tokenizer, {"one": draft}, SETS[:1], settings).failures
    assert any("drafting failed" in sentence and "out of order" in sentence for sentence in failures)
    assert any("not one draft token was proposed" in sentence for sentence in failures)


def test_an_interrupted_evaluation_goes_on(target, tokenizer, drafts, tmp_path, monkeypatch):
    path, settings = tmp_path / "out.json.partial.jsonl", {"x": (1, 2)}
    done = []

    def stop_after_four(result):
        done.append(result)
        if len(done) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(target, tokenizer, drafts, SETS, SETTINGS, PartialResults(path, settings), stop_after_four)
    calls = []
    original = harness.timed_generate
    monkeypatch.setattr(harness, "timed_generate", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    partial = PartialResults(path, settings)
    assert len(partial) == 4
    evaluation = evaluate(target, tokenizer, drafts, SETS, SETTINGS, partial)
    assert evaluation.prompt_results[:4] == done
    assert len(evaluation.prompt_results) == 12
    assert len(calls) == 3 * 8 + 3 * 2  # eight prompts left, and a warm-up for each temperature
    assert len(partial) == 12


def test_partial_results_of_other_settings_are_not_used(tmp_path):
    path = tmp_path / "p.jsonl"
    PartialResults(path, {"draft": "a"}).add((0.0, "s", 0), {"n": 1})
    assert PartialResults(path, {"draft": "a"}).get((0.0, "s", 0)) == {"n": 1}
    assert len(PartialResults(path, {"draft": "b"})) == 0
    assert len(PartialResults(path, {"draft": "a"})) == 0  # the file now belongs to "b"


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "p.jsonl"
    partial = PartialResults(path, {})
    for i in range(3):
        partial.add((0.0, "s", i), {"n": i})
    path.write_text(path.read_text()[:-9])
    partial = PartialResults(path, {})
    assert len(partial) == 2
    partial.add((0.0, "s", 2), {"n": 2})
    assert [PartialResults(path, {}).get((0.0, "s", i)) for i in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    partial.remove()
    assert not path.exists()


def test_a_garbled_file_is_started_anew(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("not JSON\n")
    assert len(PartialResults(path, {})) == 0


def test_the_fingerprint_sees_one_changed_weight(draft):
    before = fingerprint(draft)
    assert fingerprint(draft) == before
    draft.fc.weight.data[0, 0] += 1e-3
    assert fingerprint(draft) != before
    assert len(fingerprint(draft.bfloat16())) == 16


@pytest.mark.parametrize("wrong", [{"temperatures": ()}, {"temperatures": (-1.0,)}, {"max_new_tokens": 2}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(DSparkConfigError, match=next(iter(wrong))):
        EvaluationSettings(**wrong)
