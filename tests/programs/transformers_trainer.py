"""transformers' Trainer on a tiny BERT and a made-up data set."""

from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(18)
texts = [[(3 * row + 5 * place) % 90 + 5 for place in range(12)] for row in range(64)]
data = Dataset.from_dict({"input_ids": texts, "labels": [sum(text) % 2 for text in texts]})
data = data.map(lambda row: {"attention_mask": [1] * len(row["input_ids"])})
config = BertConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
)
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=4,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    seed=19,
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, eval_dataset=data)
trainer.train()
rank = trainer.args.process_index
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"rank {rank} of {trainer.args.world_size} step {entry['step']} loss {entry['loss']!r}")

# %%
print(f"rank {rank} evaluates {trainer.evaluate()['eval_loss']!r}")
