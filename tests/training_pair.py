"""Data that is easy to learn, a chat template to train on, and the arguments of a short training run."""

from hf_dspark.training import DSparkTrainingArguments

# w40 opens a turn, w41 is the user, w42 the assistant, w43 ends a turn
TEMPLATE = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'] }} w43{% endfor %}"
    "{% if add_generation_prompt %} w40 w42{% endif %}"
)


def records(count=12, length=14):
    """Answers that count upwards: easy to learn."""
    return [
        {"prompt": f"w{i % 30 + 1}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(length))}
        for i in range(count)
    ]


def arguments(folder, **changes) -> DSparkTrainingArguments:
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        num_anchors=6,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        check_data=False,  # to a random target, any text is unlikely
        seed=3,
    )
    return DSparkTrainingArguments(**{**settings, **changes})
