"""Run by `test_training_metric.py` in a process of its own: how many drafts `generate` accepts after given prefixes.

    python acceptance_in_generate.py FOLDER PREFIXES ROUNDS

FOLDER has a `target` and a `draft`. PREFIXES is JSON, a list of texts (ids): the last id of each is the anchor. Prints
as JSON, for every text, the counts of accepted drafts of ROUNDS first rounds.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_dspark import DSparkDraftModel


class FirstToken(LogitsProcessor):
    """The first new token is `token`; later ones are free. The draft never sees this."""

    def __init__(self, length: int, token: int):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self.length:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


def accepted_counts(target, draft, text: list[int], rounds: int) -> list[int]:
    prompt, anchor = torch.tensor([text[:-1]]), text[-1]
    counts = []
    for _ in range(rounds):
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=draft,
            do_sample=True,
            top_k=0,
            max_new_tokens=draft.config.num_draft_tokens + 2,  # the anchor, a full block and its bonus
            logits_processor=LogitsProcessorList([FirstToken(prompt.shape[1], anchor)]),
        )
        assert draft.last_stats.proposed[0] == draft.config.num_draft_tokens
        counts.append(draft.last_stats.accepted[0])
    return counts


if __name__ == "__main__":
    folder, prefixes, rounds = sys.argv[1:]
    torch.manual_seed(11)
    target = AutoModelForCausalLM.from_pretrained(f"{folder}/target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(f"{folder}/draft", target=target, dtype=torch.float32)
    draft.scheduler = None
    with open(prefixes, encoding="utf-8") as stream:
        texts = json.load(stream)
    print(json.dumps([accepted_counts(target, draft, text, int(rounds)) for text in texts]))
