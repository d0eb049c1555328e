import io
import json

import pytest
import torch
from rich.console import Console
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_dspark.cli import main
from hf_dspark.cli.pair import PairResult
from hf_dspark.cli.pair_view import PairView, TokenPieces
from hf_dspark.evaluation import runs
from hf_dspark.evaluation.comparison import Divergence
from hf_dspark.evaluation.runs import Run, generation_kwargs, timed_generate
from hf_dspark.generation.stats import GenerationStats

SHORT = ["--threads", "1", "--max-new-tokens", "8"]


def test_generate_prints_both_texts_one_after_the_other(pair, capsys):
    assert main(["generate", "w3 w4", "--draft", pair[1], *SHORT]) == 0
    printed = capsys.readouterr()
    plain, drafted = printed.out.split("--- with DSpark ---\n")
    text = plain.split("--- plain generate ---\n")[1].strip()
    assert text.count(" w") == 7 and drafted.startswith(f" {text}\n")
    for row in ("tokens/s, decode", "speed-up, whole call", "accepted length", "acceptance by position"):
        assert row in drafted
    assert "The texts are identical." in drafted
    assert printed.err == ""


def test_generate_as_json(pair, capsys):
    target, draft = pair
    assert main(["generate", "w3 w4", "--target", target, "--draft", draft, "--json", *SHORT]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["identical"] is True and values["divergence"] is None
    assert values["plain"]["tokens"] == values["dspark"]["tokens"] and len(values["plain"]["tokens"]) == 8
    assert values["plain"]["text"].startswith(" w") and values["plain"]["stats"] is None
    assert sum(values["dspark"]["stats"]["proposed"]) > 0
    assert values["accepted_length"] >= 1 and values["decode_speedup"] > 0 and values["end_to_end_speedup"] > 0


def test_generate_samples_by_seed_and_continues_bare_prompts(pair, capsys):
    argv = ["generate", "w3 w4", "--draft", pair[1], "--json", "--no-chat-template", "--temperature", "1.5", *SHORT]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*argv, "--seed", seed]) == 0
        values = json.loads(capsys.readouterr().out)
        texts.append((values["plain"]["text"], values["dspark"]["text"]))
        assert values["identical"] is None and "distribution" in values["verdict"]
    assert texts[0] == texts[1] != texts[2]


def test_a_wrong_text_gives_status_1(pair, capsys, monkeypatch):
    original = runs.timed_generate

    def wrong(target, inputs, draft, *args, **kwargs):
        made = original(target, inputs, draft, *args, **kwargs)
        if draft is not None:
            made.tokens[3] = (made.tokens[3] + 1) % 48
        return made

    monkeypatch.setattr(runs, "timed_generate", wrong)
    assert main(["generate", "w3 w4", "--draft", pair[1], *SHORT]) == 1
    assert "The texts differ: DIFFERENT at new token 3" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "named"), [(["", "--draft", "{draft}"], "empty"), (["x", "--draft", "./no"], "./no")])
def test_bad_input_is_one_line(pair, argv, named, capsys):
    assert main(["generate", *(word.format(draft=pair[1]) for word in argv), *SHORT]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and named in printed.err


def test_the_demo_takes_another_draft(pair, capsys):
    assert main(["demo", "w3", "--draft", pair[1], *SHORT]) == 0
    assert "The texts are identical." in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_very_short_texts(pair, limit, capsys):
    """Up to two tokens there is no room for a draft token, which is nobody's fault."""
    assert main(["generate", "w3", "--draft", pair[1], "--threads", "1", "--max-new-tokens", limit]) == 0
    assert "The texts are identical." in capsys.readouterr().out


def test_verdicts():
    plain, drafted = Run("plain", [1, 2], 0.1, 0.2), Run("dspark", [1, 2], 0.1, 0.2, GenerationStats(2, [4], [0]))

    def verdict(label):
        divergence = None if label is None else Divergence(1, 2, 3, 20.0, 19.875, 19.875, 0.125, label)
        result = PairResult(plain, drafted, divergence, sampled=False)
        return result.verdict, result.status

    assert verdict(None) == ("The texts are identical.", 0)
    text, status = verdict("tie")
    assert "tie at new token 1 (top-2 gap 0.125 = 1.0 ulp)" in text and status == 0
    assert verdict("DIFFERENT")[1] == 1
    nothing = Run("dspark", [1, 2], 0.1, 0.2, GenerationStats(2, [0], [0], [0], ["no context"]))
    assert PairResult(plain, nothing, None, sampled=False).status == 1
    failed = Run("dspark", [1, 2], 0.1, 0.2, GenerationStats(2, [4], [0], failure="RuntimeError: x"))
    assert PairResult(plain, failed, None, sampled=False).status == 1


def test_pieces_join_to_the_text_and_characters_stay_whole():
    letters = {f"<0x{byte:02X}>": byte for byte in range(256)}
    fast = Tokenizer(models.BPE(letters, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    text = "aé€😀b"
    pieces = TokenPieces(tokenizer)
    for byte in text.encode():
        pieces.append(byte)
    assert pieces.pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def terminal(width=100, height=30):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="standard")


def test_the_stream_shows_the_colours_that_the_statistics_confirm():
    """What is read off the stream while it runs equals the account given at the end."""
    target = tiny_target()
    draft = tiny_draft(target)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)[0, 3:].tolist()

    # An oracle for every other round, so that rounds with and without accepted drafts occur.
    rounds = []

    def step(base_logits, hidden, previous_ids, state):
        step.count += 1
        place = step.anchor + step.count
        logits = torch.full_like(base_logits, -10.0)
        logits[:, plain[place] if place < len(plain) and len(rounds) % 2 else 0] = 10.0
        return logits, hidden.new_zeros(len(hidden), draft.config.markov_rank), state

    start = type(draft).start_block.__get__(draft)

    def start_block(cache, anchor_ids, anchor_positions):
        rounds.append(1)
        step.count, step.anchor = 0, int(anchor_positions) - 3
        return start(cache, anchor_ids, anchor_positions)

    draft.start_block, draft.sequential_step = start_block, step
    with PairView(terminal(), tiny_tokenizer(), target, "prompt") as view:
        run = timed_generate(target, inputs, draft, "dspark", on_tokens=view.start("dspark"), **generation_kwargs(40))
        pane = view._panes["dspark"]
        live = pane.text()
        view.finish(run)
        final = pane.text()
    assert run.tokens == plain and sum(run.stats.accepted) > 0 and 0 in run.stats.accepted
    assert live.plain == final.plain
    assert live.spans[:-1] == final.spans[:-1]  # the limit may fall on a draft token of the last round
    assert len(final.spans) == sum(run.from_draft()) == sum(run.stats.accepted)


@pytest.mark.parametrize("width", [100, 50])
def test_panels_show_the_end_of_long_texts(width):
    console = terminal(width, height=14)
    view = PairView(console, tiny_tokenizer(), tiny_target(), "the prompt")
    for name in ("plain", "dspark"):
        view.start(name)([5] * 400 + [7, 8])
    console.print(view.panels(height=12))
    shown = console.file.getvalue()
    assert shown.count("w8") == 2 and shown.count("\n") <= 14
    console.print(view.panels())
    assert console.file.getvalue().count("w5") >= 800
