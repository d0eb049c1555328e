"""What the trainer keeps of its runs, and what `push_to_hub=True` pushes; against a fake Hub."""

from __future__ import annotations

import json

import pytest
from fake_hub import READ
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from training_pair import TEMPLATE, arguments, records

from hf_dspark import DSparkDraftModel
from hf_dspark.errors import DSparkHubError
from hf_dspark.training import DSparkTrainer

TARGET = "org/target"


@pytest.fixture
def trainer_for(tmp_path):
    def build(folder="out", draft=None, eval_data=None, **changes) -> DSparkTrainer:
        target = tiny_target()
        return DSparkTrainer(
            model=draft or tiny_draft(target, target_model_name_or_path=TARGET),
            target=target,
            args=arguments(tmp_path / folder, **changes),
            train_dataset=records(),
            eval_dataset=eval_data,
            processing_class=tiny_tokenizer(TEMPLATE),
            data_names=["counting"],
        )

    return build


def runs(folder) -> list[dict]:
    return json.loads((folder / "training_facts.json").read_text())["runs"]


# --------------------------------------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------------------------------------
def test_facts_of_a_run(trainer_for, tmp_path):
    trainer = trainer_for(eval_data=records(3), max_steps=3, gradient_accumulation_steps=2, muon_learning_rate=0.01)
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    (run,) = runs(tmp_path / "out")
    assert run["steps"] == 3 and run["sequences_per_step"] == 4 and run["data"]["names"] == ["counting"]
    assert run["data"]["train"]["samples"] == 12 and run["data"]["held_out"]["samples"] == 3
    ids, mask = trainer.train_dataset.samples[0]
    assert run["data"]["train"]["tokens"] == 12 * len(ids)
    assert run["data"]["train"]["supervised_tokens"] == 12 * int(mask.sum())
    assert run["slots"] == sum(entry.get("slots", 0) for entry in trainer.state.log_history) > 0
    assert run["seconds"] > 0 and run["precision"] == "fp32" and run["hardware"].startswith("CPU (")
    assert run["learning_rate"] == 3e-3 and run["muon_learning_rate"] == 0.01 and run["started_from"] == ""
    assert run["metrics"]["eval_accepted_length_greedy"] == run["curve"][-1]["greedy"] >= 1


def test_facts_of_an_interrupted_run_are_of_the_whole(trainer_for, tmp_path):
    """A save between two log lines, resumed: no slot is lost or counted twice, and its time goes on."""
    whole = trainer_for("whole", max_steps=4, save_strategy="steps", save_steps=1, logging_steps=3)
    whole.train()
    whole.save_model()
    first = trainer_for("part", max_steps=2, save_strategy="steps", save_steps=1, logging_steps=3)
    first.train()
    (earlier,) = runs(tmp_path / "part" / "checkpoint-2")
    second = trainer_for("part", max_steps=4, save_strategy="steps", save_steps=1, logging_steps=3)
    second.train(resume_from_checkpoint=True)
    second.save_model()
    (run,), (expected,) = runs(tmp_path / "part"), runs(tmp_path / "whole")
    assert run["steps"] == 4 and run["slots"] == expected["slots"]
    assert run["seconds"] > earlier["seconds"]


def test_runs_add_up(trainer_for, tmp_path):
    """A draft that was trained before, and `train` called twice."""
    first = trainer_for("first", max_steps=1)
    first.train()
    first.train()
    first.save_model()
    assert [run["steps"] for run in runs(tmp_path / "first")] == [1, 1]
    assert runs(tmp_path / "first")[0]["slots"] > 0
    draft = DSparkDraftModel.from_pretrained(tmp_path / "first")
    second = trainer_for("second", draft=draft, max_steps=2)
    second.save_model(str(tmp_path / "untrained"))
    assert len(runs(tmp_path / "untrained")) == 2  # saving is not training
    second.train()
    second.save_model()
    assert [(run["steps"], run["started_from"]) for run in runs(tmp_path / "second")] == [
        (1, ""),
        (1, ""),
        (2, "first"),
    ]


# --------------------------------------------------------------------------------------------------------------------
# The Hub
# --------------------------------------------------------------------------------------------------------------------
PUSHING = dict(push_to_hub=True, hub_model_id="me/poems", hub_license="mit", save_strategy="steps", save_steps=1)


def test_each_save_is_pushed_with_a_card(trainer_for, hub, monkeypatch):
    seen = []
    answer = hub.answer

    def watching(request):
        response = answer(request)
        if "/commit/" in request.url.path:
            seen.append(hub.card("me/poems"))
        return response

    monkeypatch.setattr(hub, "answer", watching)
    trainer_for(max_steps=2, hub_always_push=True, **PUSHING).train()
    assert "| steps | 1 (" in seen[0] and "| steps | 2 (" in seen[-1]
    card = hub.card("me/poems")
    assert "base_model: org/target" in card and "license: mit" in card and "counting" in card
    assert {"model.safetensors", "config.json", "training_facts.json"} <= set(hub.files("me/poems"))
    assert not any(name.startswith("checkpoint") for name in hub.files("me/poems"))


def test_the_end_of_training_is_pushed_with_what_is_said_of_it(trainer_for, hub):
    trainer = trainer_for(max_steps=1, **{**PUSHING, "save_strategy": "no"})
    trainer.train()
    trainer.push_to_hub(language="en", tags="counting", model_name="Counting", dataset="org/numbers")
    card = hub.card("me/poems")
    assert (
        "\n# Counting\n" in card
        and "language: en" in card
        and "- counting\n" in card
        and "datasets: org/numbers" in card
    )


def test_a_hand_written_card_survives_training(trainer_for, hub):
    hub.add("me/poems", {"README.md": b"---\nlanguage: fr\n---\n# Mine\n\nBy hand.\n"})
    trainer_for(max_steps=2, hub_always_push=True, **PUSHING).train()
    card = hub.card("me/poems")
    assert card.endswith("# Mine\n\nBy hand.\n") and "language: fr" in card and "license: mit" in card


def test_a_card_that_breaks_meanwhile_does_not_end_the_training(trainer_for, hub, tmp_path, caplog):
    trainer = trainer_for(max_steps=2, hub_always_push=True, **PUSHING)
    hub.files("me/poems")["README.md"] = b"---\n- broken\n---\n# Mine\n"
    trainer.train()
    assert trainer.state.global_step == 2 and hub.card("me/poems").endswith("# Mine\n")
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()


def test_what_a_push_needs_is_asked_for_before_training(trainer_for, hub, monkeypatch):
    with pytest.raises(DSparkHubError, match="Under which licence"):
        trainer_for(**{**PUSHING, "hub_license": None})
    with pytest.raises(DSparkHubError, match="--base-model"):
        trainer_for(draft=tiny_draft(tiny_target()), **PUSHING)
    trainer_for(draft=tiny_draft(tiny_target()), hub_base_model=TARGET, **PUSHING)
    monkeypatch.setenv("HF_TOKEN", READ)
    with pytest.raises(DSparkHubError, match="may not write to me/other"):
        trainer_for(**{**PUSHING, "hub_model_id": "me/other"})


def test_a_card_without_a_push(trainer_for, hub, tmp_path):
    trainer = trainer_for(max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(license="mit", finetuned_from=TARGET)
    first = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 1 (" in first and "license: mit" in first
    trainer.create_model_card()  # what the first card says is known now
    assert (tmp_path / "out" / "README.md").read_text() == first
    assert not any("commit" in request for request in hub.requests)
