"""`hf-dspark train`, end to end on a tiny target, and everything it refuses in one line."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkDraftModel
from hf_dspark.cli import main
from hf_dspark.cli.train import parse

# w40 opens a turn, w41 is the user, w42 the assistant, w43 ends a turn
TEMPLATE = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'] }} w43{% endfor %}"
    "{% if add_generation_prompt %} w40 w42{% endif %}"
)
SETTINGS = """
num_hidden_layers: 1
block_size: 4
markov_rank: 4
target_layer_ids: [0, 2]
validation_share: 0.25
num_anchors: 6
max_steps: 2
per_device_train_batch_size: 2
learning_rate: 1e-3
bf16: no
use_cpu: true
check_data: no
save_strategy: no
logging_steps: 1
report_to: none
disable_tqdm: true
seed: null
"""


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "target"
    tiny_target().save_pretrained(path)
    tiny_tokenizer(TEMPLATE).save_pretrained(path)
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Answers that count upwards."""
    rows = [{"prompt": f"w{i}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(12))} for i in range(1, 13)]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path):
    """Writes a YAML file; gives the options that name it."""

    def write(text=SETTINGS):
        path = tmp_path / "train.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


@pytest.fixture
def train(tmp_path, target_path, data, config):
    """Runs the command with the settings above and more options; gives the output folder."""

    def run(*options, folder="out"):
        out = tmp_path / folder
        argv = ["train", *config(), "--target", target_path, "--data", data, "--output_dir", str(out)]
        assert main([*argv, *options]) == 0
        return out

    return run


@pytest.fixture
def refused(capsys):
    """Runs the command, which must say one line and exit with 2; gives the line."""

    def run(*argv):
        assert main(["train", *map(str, argv)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("hf-dspark: error: ") and printed.err.count("\n") == 1
        return printed.err

    return run


def load(out, target_path, **kwargs):
    target = AutoModelForCausalLM.from_pretrained(target_path)
    return DSparkDraftModel.from_pretrained(out, target=target, **kwargs), target


def test_end_to_end(train, target_path):
    out = train()
    draft, target = load(out, target_path)
    assert draft.dtype == torch.bfloat16
    assert draft.config.target_model_name_or_path == target_path
    assert draft.config.training_max_length == len("ouaWooa") + 12  # two turns' marks, the question, the answer
    names = set(load_file(out / "model.safetensors"))
    assert not {name for name in names if "embed" in name or "lm_head" in name or name == "d2t"}
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert {"loss", "acceptance_greedy_1"} <= set(state["log_history"][0])
    assert state["log_history"][-1]["eval_accepted_length_sample"] >= 1  # the held-out samples, with the last weights

    prompt = torch.tensor([[3, 4, 5]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=16)
    assert torch.equal(plain, target.generate(prompt, do_sample=False, max_new_tokens=16, assistant_model=draft))
    assert sum(draft.last_stats.proposed) > 0


def test_the_command_line_wins_over_yaml_over_defaults(config, data):
    text = SETTINGS + f"target: t\ndata: {data}\n"
    model_args, args = parse([*config(text), "--block_size", "6", "--no_initialize"])
    assert model_args.block_size == 6 and model_args.initialize is False
    assert model_args.data == [data] and model_args.target_layer_ids == [0, 2]
    assert args.learning_rate == 1e-3 and args.save_strategy == "no" and args.bf16 is False
    assert args.seed == 42 and args.loss_decay_gamma == 4.0
    model_args, _ = parse(["--target_layer_ids", "1", *config(text), "--data", "a", "b"])
    assert model_args.target_layer_ids == [1] and model_args.data == ["a", "b"]


def test_a_mapping_in_yaml_keeps_its_types(config):
    text = "target: t\ndata: [a]\nlr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 2}\n"
    assert parse(config(text))[1].lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_sise: 4\nrankk: 3\n", ["train.yaml", "block_sise, rankk"]),
        ("help: true\n", ["no such option: help"]),
        ("a: [1,\n", ["is not YAML"]),
        ("- just\n- a list\n", ["option: value", "list"]),
        ("", ["option: value"]),
        ("target: t\n", ["required", "--data"]),
        ("target: t\ndata: [d]\nblock_size: four\n", ["--block_size", "four"]),
        ("target: t\ndata: [d]\nblock_size: 4.5\n", ["--block_size", "4.5"]),
        ("target: t\ndata: [d]\nmarkov_head_type: fancy\n", ["--markov_head_type", "fancy", "gated"]),
        ("target: t\ndata: [d]\nexport_dtype: int3\n", ["--export_dtype", "int3", "bfloat16"]),
        ("target: t\ndata: [d]\nsave_strategy: sometimes\n", ["sometimes"]),
        ("target: t\ndata: [d]\nnum_anchors: 0\n", ["num_anchors is 0"]),
    ],
)
def test_bad_yaml_is_refused(text, words, config, refused):
    line = refused(*config(text))
    assert all(word in line for word in words), line


def test_bad_options_are_refused(refused, tmp_path):
    assert "no such option: --nonsense 3" in refused("--target", "t", "--data", "d", "--nonsense", "3")
    assert "no such option: --conf" in refused("--target", "t", "--data", "d", "--conf", "x.yaml")
    assert "--target" in refused("--data", "d")
    assert "--config" in refused("--config")
    missing = tmp_path / "missing.yaml"
    assert str(missing) in refused("--config", missing)


def test_bad_data_is_refused(refused, config, target_path, data, tmp_path):
    start = [*config(), "--target", target_path, "--output_dir", tmp_path / "out", "--data"]
    assert "No such data file" in refused(*start, tmp_path / "missing.jsonl")
    file = tmp_path / "odd.jsonl"
    for row, words in (
        ("{", "line 1 is not JSON"),
        ({"text": "w1"}, "Record 0: A record has the fields ['text']"),
        ({"messages": ["w1"]}, "Record 0: `messages` must be a list of objects"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "Nothing to supervise"),
    ):
        line = row if isinstance(row, str) else json.dumps(row)
        file.write_text(f"{line}\n{line}\n")
        assert words in refused(*start, file)
    file.write_text(json.dumps({"prompt": "w1", "response": "w2 w3"}))
    assert "cannot be split" in refused(*start, file)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_trained_is_refused(refused, config, target_path, data, tmp_path):
    start = [*config(), "--data", data, "--output_dir", tmp_path / "out"]
    assert "no folder" in refused(*start, "--target", tmp_path / "none")
    start += ["--target", target_path]
    assert "no folder" in refused(*start, "--draft", tmp_path / "none")
    assert "holds no checkpoint" in refused(*start, "--resume")
    assert "`draft_vocab_size` is 49" in refused(*start, "--draft_vocab_size", "49")
    assert "`draft_vocab_size` is -3" in refused(*start, "--draft_vocab_size=-3")
    assert "target_layer_ids" in refused(*start, "--target_layer_ids", "0", "3")
    assert "eval" in refused(*start, "--validation_share", "0", "--eval_strategy", "steps", "--eval_steps", "1")
    assert "nowhere" in refused(*start, "--report_to", "nowhere")


def test_a_refusal_is_all_that_stderr_gets(config, target_path, tmp_path):
    """In a process of its own: no warning of a library stands beside the line."""
    file = tmp_path / "empty.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "w1"}]}\n' * 2)
    argv = ["train", *config(), "--target", target_path, "--data", str(file), "--output_dir", str(tmp_path / "out")]
    script = f"import sys; from hf_dspark.cli import main; sys.exit(main({argv}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Nothing to supervise" in done.stderr, done.stderr


@pytest.mark.parametrize("options", [(), ("--eval_strategy", "steps", "--eval_steps", "1")], ids=["none", "steps"])
def test_the_last_weights_are_evaluated_once(train, options):
    state = json.loads((train(*options) / "trainer_state.json").read_text())
    evaluated = [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]
    assert evaluated == ([1, 2] if options else [2])


def test_skipped_records_are_counted(train, data, capsys):
    with open(data, "a") as stream:
        stream.write('\n{"messages": [{"role": "user", "content": "w5"}]}\n')
    train()
    assert "1 of 13 records have nothing to train on and are skipped" in capsys.readouterr().err


def test_a_reduced_vocabulary_holds_what_is_supervised_most(train, target_path):
    out = train("--draft_vocab_size", "20")
    draft, target = load(out, target_path, dtype=torch.float32)
    kept = draft.draft_token_ids
    assert len(kept) == 20 and 43 in kept and 41 not in kept  # the end of turn is supervised, the user's mark is not
    rows = target.get_output_embeddings().weight[kept]
    torch.testing.assert_close(draft.lm_head.weight, rows.bfloat16().float())


def test_warm_start(train, target_path, tmp_path):
    """From the weights and the shape of the draft that is given, in fp32."""
    given = tiny_draft(tiny_target(), num_hidden_layers=2, block_size=3)
    given.save_pretrained(tmp_path / "given")
    out = train("--draft", str(tmp_path / "given"), "--learning_rate", "0", "--export_dtype", "float32")
    draft, _ = load(out, target_path)
    assert draft.config.block_size == 3 and draft.config.target_model_name_or_path == target_path
    for name, value in given.state_dict().items():
        assert torch.equal(draft.state_dict()[name], value), name


def test_resume_continues_from_the_last_checkpoint(train):
    """Interrupted and resumed is the same as uninterrupted, a reduced vocabulary included."""
    options = ["--draft_vocab_size", "20", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
    whole = train(*options, "--max_steps", "4", folder="whole")
    saving = [*options, "--save_strategy", "steps", "--save_steps", "2"]
    train(*saving, "--max_steps", "2", folder="part")
    part = train(*saving, "--max_steps", "4", "--resume", folder="part")
    assert json.loads((part / "trainer_state.json").read_text())["global_step"] == 4
    expected, got = load_file(whole / "model.safetensors"), load_file(part / "model.safetensors")
    assert all(torch.equal(got[name], value) for name, value in expected.items())
