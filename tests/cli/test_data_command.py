"""`hf-dspark data`: the three verbs on a tiny target, and everything that they refuse in one line."""

import io
import json
import shutil

import datasets
import pytest
import torch
from rich.console import Console
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from transformers import AutoTokenizer

from hf_dspark.cli import main
from hf_dspark.cli.data_view import CLOSE, OPEN, RecordProgress, inspection_view
from hf_dspark.training.data import read_jsonl
from hf_dspark.training.inspection import inspect_records
from hf_dspark.training.target_text import TargetWriter

# w40 opens a turn, w41 is the user, w42 the assistant, w43 ends a turn.
TEMPLATE = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'].strip() }} w43"
    "{% endfor %}{% if add_generation_prompt %} w40 w42{{ ' w39' if plain else '' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A target that ends a turn after a dozen tokens or so, and with it a draft."""
    folder = tmp_path_factory.mktemp("data")
    target = tiny_target()
    target.lm_head.weight.data[[0, 40, 41, 42]] *= 0.01
    target.save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [" w40", " w41", " w42", " w43"]})
    tokenizer.save_pretrained(folder / "target")
    tiny_draft(target, target_model_name_or_path=str(folder / "target")).save_pretrained(folder / "draft")
    return str(folder / "target")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"w{i} w{i + 1}", f"w{i + 2}"]} for i in range(1, 8)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def regenerate(tmp_path, target_path, data):
    def run(*options, output="out.jsonl"):
        argv = ["--target", target_path, "--data", data, "--output", str(tmp_path / output), "--threads", "1"]
        return main(["data", "regenerate", *argv, "--max-new-tokens", "16", "--batch-size", "2", *options])

    return run


@pytest.fixture
def synthesize(tmp_path, target_path):
    def run(count, *options, output="out.jsonl"):
        argv = ["--target", target_path, "--count", str(count), "--output", str(tmp_path / output), "--threads", "1"]
        limits = ["--max-new-tokens", "16", "--max-user-tokens", "32"]
        return main(["data", "synthesize", *argv, *limits, "--batch-size", "4", *options])

    return run


@pytest.fixture
def refused(capsys):
    """Runs what must say one line and exit with 2; gives the line."""

    def check(status):
        printed = capsys.readouterr()
        assert status == 2 and printed.out == ""
        assert printed.err.startswith("hf-dspark: error: ") and printed.err.count("\n") == 1, printed.err
        return printed.err

    return check


def meta(path):
    return json.loads((path.parent / f"{path.name}.meta.json").read_text())


def test_regenerate_then_inspect_then_train_on_it(regenerate, tmp_path, target_path, data, capsys):
    out = tmp_path / "out.jsonl"
    assert regenerate("--temperature", "0", "1") == 0
    printed = capsys.readouterr()
    assert "7 records with" in printed.out and "7/7 records" in printed.err and "tokens/s" in printed.err
    records = read_jsonl(out)
    assert [record["messages"][0]["content"] for record in records] == [f"w{i} w{i + 1}" for i in range(1, 8)]
    assert {record["temperature"] for record in records} == {0.0, 1.0}
    values = meta(out)
    assert values["settings"]["target"] == target_path and values["settings"]["temperature"] == [0.0, 1.0]
    assert values["settings"]["max_new_tokens"] == 16 and values["settings"]["dtype"] == "float32"
    assert values["chat_template"] == TEMPLATE and len(values["settings"]["chat_template_sha256"]) == 64
    assert values["data"]["records"] == 7 and values["data"]["sources"] == [data]
    assert values["counts"]["tokens"] == sum(record["tokens"] for record in records)
    assert {"torch", "transformers", "hf-dspark"} <= set(values["runs"][0]["versions"])
    assert values["runs"][0]["records"] == 7

    assert (
        main(["data", "inspect", str(out), "--plot", str(tmp_path / "lengths.png")]) == 0
    )  # the meta names the target
    shown = capsys.readouterr().out
    assert "supervised" in shown and "Lengths" in shown and "sample 3" in shown
    assert OPEN in shown and CLOSE in shown and "\x1b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")

    argv = ["--target", target_path, "--data", str(out), "--output_dir", str(tmp_path / "draft"), "--max_steps", "1"]
    quick = ["--validation_share", "0", "--use_cpu", "--bf16", "false", "--report_to", "none", "--check_data", "false"]
    small = ["--num_hidden_layers", "1", "--markov_rank", "4", "--target_layer_ids", "0", "2", "--save_strategy", "no"]
    assert main(["train", *argv, *quick, *small]) == 0


def test_regenerate_goes_on_after_an_interrupt(regenerate, tmp_path, capsys, monkeypatch):
    assert regenerate(output="whole.jsonl") == 0
    original, calls = TargetWriter.__call__, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(TargetWriter, "__call__", interrupted)
    assert regenerate() == 130
    kept = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert 0 < kept < 7 and f"{kept} records are kept" in capsys.readouterr().err
    assert meta(tmp_path / "out.jsonl")["counts"]["records"] == kept
    monkeypatch.undo()
    assert regenerate() == 0
    assert f"{kept} of 7 records are there" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert [run["records"] for run in meta(tmp_path / "out.jsonl")["runs"]] == [kept, 7 - kept]
    assert regenerate() == 0  # nothing is left to do
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_regenerate_goes_on_with_the_same_settings_and_data_only(regenerate, tmp_path, refused, capsys):
    assert regenerate("--limit", "4") == 0
    capsys.readouterr()
    before = (tmp_path / "out.jsonl").read_text()
    for options, words in (
        (["--temperature", "0.5"], "temperature [0.0, 0.7, 1.0] there, [0.5] now"),
        (["--max-new-tokens", "17"], "max_new_tokens 16 there, 17 now"),
        (["--seed", "1", "--top-k", "5"], "top_k 0 there, 5 now; seed 0 there, 1 now"),
        (["--dtype", "bfloat16"], 'dtype "float32" there'),
        (["--system", "w9"], 'system null there, "w9" now'),
        (["--template-kwargs", '{"plain": 1}'], 'template_kwargs {} there, {"plain": 1} now'),
        (["--limit", "2"], "holds 2 answers to prompts that"),
    ):
        assert words in refused(regenerate(*options))
    assert (tmp_path / "out.jsonl").read_text() == before
    assert regenerate("--batch-size", "3") == 0  # the whole of --data; another batch size is no other setting
    assert (tmp_path / "out.jsonl").read_text().startswith(before) and len(read_jsonl(tmp_path / "out.jsonl")) == 7


def test_other_weights_or_another_template_are_other_settings(regenerate, tmp_path, target_path, refused, capsys):
    other = tmp_path / "target"
    shutil.copytree(target_path, other)
    assert regenerate("--target", str(other), "--limit", "1") == 0
    capsys.readouterr()
    (other / "chat_template.jinja").write_text(TEMPLATE.replace("w39", "w38"))
    assert "chat_template_sha256" in refused(regenerate("--target", str(other), "--limit", "1"))
    (other / "chat_template.jinja").write_text(TEMPLATE)
    tiny_target(seed=1).save_pretrained(other)
    assert "weights" in refused(regenerate("--target", str(other), "--limit", "1"))


def test_template_settings_reach_the_template_and_the_record(regenerate, tmp_path, monkeypatch):
    seen = []
    original = TargetWriter.__call__

    def spy(self, prompts, *args):
        seen.extend(prompt[-1] for prompt in prompts)
        return original(self, prompts, *args)

    monkeypatch.setattr(TargetWriter, "__call__", spy)
    assert regenerate("--template-kwargs", '{"plain": true}', "--limit", "2") == 0
    assert set(seen) == {39}
    assert all(record["chat_template_kwargs"] == {"plain": True} for record in read_jsonl(tmp_path / "out.jsonl"))


def test_many_answers_and_a_draft(regenerate, tmp_path, target_path, refused):
    draft = target_path.replace("target", "draft")
    assert regenerate("--temperature", "0", "--output", str(tmp_path / "plain.jsonl")) == 0
    argv = ["--temperature", "0", "--draft", draft]
    assert regenerate(*argv, "--output", str(tmp_path / "drafted.jsonl")) == 0  # two at a time
    plain, drafted = read_jsonl(tmp_path / "plain.jsonl"), read_jsonl(tmp_path / "drafted.jsonl")
    assert plain == drafted and meta(tmp_path / "drafted.jsonl")["runs"][0]["draft"] == draft
    assert regenerate("--samples", "3", "--limit", "2") == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    assert len(records) == 6 == len({record["id"] for record in records})
    assert [sorted(r["temperature"] for r in records[i : i + 3]) for i in (0, 3)] == [[0.0, 0.7, 1.0]] * 2


def test_a_datasets_id(regenerate, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "w1"}, {"question": "w2"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {"some/set": rows}[name])
    assert regenerate("--data", "some/set", "--prompt-field", "question") == 0
    assert [r["messages"][0]["content"] for r in read_jsonl(tmp_path / "out.jsonl")] == ["w1", "w2"]


def test_synthesize_writes_exactly_so_many_and_goes_on(synthesize, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert synthesize(6, "--turns", "2") == 0
    printed = capsys.readouterr()
    assert "6 records with" in printed.out and "6/6 records" in printed.err
    first = out.read_text()
    assert synthesize(9, "--turns", "2") == 0
    records = read_jsonl(out)
    assert out.read_text().startswith(first) and len(records) == 9
    assert len({" ".join(record["messages"][0]["content"].split()) for record in records}) == 9
    assert meta(out)["settings"]["turns"] == 2 and meta(out)["settings"]["user_turns"]["max_new_tokens"] == 32
    assert main(["data", "inspect", str(out), "--json", "--samples", "1"]) == 0
    values = json.loads(capsys.readouterr().out.split("meta.json\n")[-1])
    assert values["records"] == 9 and len(values["shown"]) == 1


def test_synthesize_with_openings(synthesize, tmp_path, refused, capsys):
    file = tmp_path / "openings.txt"
    file.write_text("w5 w6\n\nw7\n")
    assert synthesize(4, "--openings", str(file)) == 0
    assert synthesize(4, "--openings", "w5 w6", "w7", output="same.jsonl") == 0
    capsys.readouterr()
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "same.jsonl").read_text()
    assert all(r["messages"][0]["content"].startswith(("w5 w6", "w7")) for r in read_jsonl(tmp_path / "out.jsonl"))
    assert 'openings ["w5 w6", "w7"] there, ["w9"] now' in refused(synthesize(4, "--openings", "w9"))
    assert "holds 4 records already, but --count is 3" in refused(synthesize(3, "--openings", str(file)))


def test_bad_input_is_one_line(regenerate, synthesize, tmp_path, data, refused):
    none = str(tmp_path / "none")
    assert "No such data file" in refused(regenerate("--data", none + ".jsonl"))
    assert "no folder" in refused(regenerate("--target", none + "/x"))
    assert "is not JSON" in refused(regenerate("--template-kwargs", "{"))
    assert "must be a JSON object" in refused(regenerate("--template-kwargs", "[1]"))
    assert "top_p is 3.0" in refused(regenerate("--top-p", "3"))
    assert "--samples is 4" in refused(regenerate("--samples", "4"))
    assert "--user-temperature is 0" in refused(synthesize(3, "--user-temperature", "0"))
    assert "empty text" in refused(synthesize(3, "--openings", "w1", ""))
    assert "--prompt-field" in refused(regenerate("--prompt-field", "question"))
    assert "Which target?" in refused(main(["data", "regenerate", "--data", data, "--output", none]))
    assert "Whose tokenizer?" in refused(main(["data", "inspect", data]))
    assert "no folder" in refused(main(["data", "inspect", data, "--target", none + "/x"]))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "w1"}\n{"text": "w1"}\n')
    assert "Record 1: it has the fields ['text']" in refused(regenerate("--data", str(bad)))
    (tmp_path / "out.jsonl").write_text('{"mine": 1}\n')
    assert "does not" in refused(regenerate())
    assert (tmp_path / "out.jsonl").read_text() == '{"mine": 1}\n'


def test_what_cannot_be_inspected_is_one_line(tmp_path, target_path, refused):
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    assert "Nothing to supervise" in refused(main(["data", "inspect", str(file), "--target", target_path]))


def test_out_of_memory_keeps_what_there_is(regenerate, tmp_path, capsys, monkeypatch):
    original, calls = TargetWriter.__call__, []

    def full(self, *args):
        calls.append(1)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no more")
        return original(self, *args)

    monkeypatch.setattr(TargetWriter, "__call__", full)
    assert regenerate() == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "2 records are kept" in message and "--batch-size" in message
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 2


def test_a_mistyped_verb_is_one_line(capsys):
    for argv in (["data"], ["data", "regenerat"], ["data", "inspect"], ["data", "synthesize", "--count", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        printed = capsys.readouterr()
        assert stop.value.code == 2 and printed.err.count("\n") == 1 and "--help" in printed.err


def test_each_verb_has_help(capsys):
    for verb in ("regenerate", "synthesize", "inspect"):
        with pytest.raises(SystemExit) as stop:
            main(["data", verb, "--help"])
        assert stop.value.code == 0 and f"hf-dspark data {verb}" in capsys.readouterr().out


def test_colours_on_a_terminal(target_path):
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    found = inspect_records([{"prompt": "w1", "response": "w2 w3"}], tokenizer, 512)
    console = Console(force_terminal=True, width=80, color_system="standard", record=True)
    with console.capture() as captured:
        console.print(inspection_view(found, colour=True))
    text = captured.get()
    assert "\x1b[1;32m w2 w3 w43\x1b[0m" in text and OPEN not in text


def test_progress_is_exact_and_names_the_rate():
    console = Console(file=io.StringIO(), record=True)
    with RecordProgress(console, total=10, done=4) as progress:
        progress.advance(2, 50)
        progress.advance(4, 70)
    assert "10/10 records" in console.export_text() and "records/min" in progress.rate
