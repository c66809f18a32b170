"""Train the target and the draft on one CPU core and write both folders.

    python scripts/tiny_pair/train.py --minutes 20

The target learns the corpus; the draft then learns the target's distribution over the same corpus, because
a draft token is accepted for agreeing with the target, whatever the text said. The learning rate follows the
clock rather than a number of steps: a slower machine gives a weaker pair, not a longer wait.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from corpus import build_corpus
from models import DRAFT_DIR, TARGET_DIR, build_draft, build_target, save
from tokenizer import encode_documents
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

BATCH_TOKENS = 1024
# Short windows first: they teach the words in cheap steps, and long ones then only have to teach distance.
LENGTHS = (128, 256, 512)
LEARNING_RATE = 3e-3
WARM_UP = 0.03
TARGET_SHARE = 0.7
REPORT_SECONDS = 5.0
HELD_OUT = 64 * LENGTHS[-1]

Loss = Callable[[Tensor], Tensor]


def main() -> None:
    """Train both models within the time that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of both models together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    print("corpus: reading", flush=True)
    stream = encode_documents(build_corpus(arguments.seed))
    text, held_out = stream[:-HELD_OUT], stream[-HELD_OUT:].view(-1, 4, LENGTHS[-1]).long()
    print(f"corpus: {len(stream):,} tokens", flush=True)

    target = build_target()
    seconds = 60 * arguments.minutes
    train("target", target, target_loss(target), text, TARGET_SHARE * seconds)
    save(target, TARGET_DIR)
    report_held_out("target", held_out, lambda ids: next_token_loss(target, ids))

    draft = build_draft()
    train("draft", draft, distillation_loss(draft, target), text, (1 - TARGET_SHARE) * seconds)
    save(draft, DRAFT_DIR)
    report_held_out("draft", held_out, lambda ids: next_token_loss(draft, ids))
    report_held_out("draft agrees with target", held_out, lambda ids: agreement(draft, target, ids))


def train(name: str, model: PreTrainedModel, loss_of: Loss, text: Tensor, seconds: float) -> None:
    """Take AdamW steps until the time is up, with warm-up and cosine decay over that time."""
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{name}: {size:,} parameters", flush=True)

    started = reported = time.monotonic()
    recent: list[float] = []
    step = 0
    while (done := ((now := time.monotonic()) - started) / seconds) < 1:
        if now - reported > REPORT_SECONDS:
            mean = sum(recent) / len(recent)
            print(f"{name}: step {step}, loss {mean:.3f}, {seconds + started - now:.0f} s left", flush=True)
            reported, recent = now, []
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate_factor(done)
        loss = loss_of(batch(text, LENGTHS[int(done * len(LENGTHS))]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        step += 1


def learning_rate_factor(done: float) -> float:
    """Return the share of the peak learning rate after a share `done` of the time."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def batch(text: Tensor, length: int) -> Tensor:
    """Return random windows of the token stream, as many as make up a batch."""
    starts = torch.randint(len(text) - length, (BATCH_TOKENS // length, 1))
    return text[starts + torch.arange(length)].long()


def target_loss(target: PreTrainedModel) -> Loss:
    """Return the next-token loss with the router's balance term, which keeps all experts in use."""
    return lambda ids: target(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False).loss


def distillation_loss(draft: PreTrainedModel, target: PreTrainedModel) -> Loss:
    """Return the cross entropy of the draft against the target's distribution at every position."""

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            aims = target(input_ids=ids, use_cache=False).logits.softmax(-1)
        logits = draft(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), aims.flatten(0, 1))

    return loss


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the plain next-token loss."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def agreement(draft: PreTrainedModel, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the share of positions where both models rank the same token first."""
    first = [model(input_ids=ids, use_cache=False).logits.argmax(-1) for model in (draft, target)]
    return (first[0] == first[1]).float().mean()


@torch.no_grad()
def report_held_out(name: str, held_out: Tensor, measure: Loss) -> None:
    """Print the mean of a measure over text that no model saw."""
    mean = torch.stack([measure(ids) for ids in held_out]).mean()
    print(f"{name}, held-out text: {mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
