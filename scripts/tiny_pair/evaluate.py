"""Run the pair in vLLM: print how deep each kind of text accepts, and whether speculation changes it.

    python scripts/tiny_pair/evaluate.py --dtype float32 --compare

Decoding is greedy and the draft proposes six tokens a step. `--compare` generates the same prompts without
speculation as well, one at a time and all together, and counts the outputs that differ.
"""

import argparse
import gc
import os
from collections.abc import Iterable

# Read by vLLM when it is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from models import DRAFT_DIR, TARGET_DIR
from prompts import PROMPTS
from vllm import LLM, SamplingParams

DRAFTS = 6
EVERYTHING = [prompt for kind in PROMPTS.values() for prompt in kind]


def main() -> None:
    """Print acceptance and samples, and with --compare the outputs that speculation changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--samples", type=int, default=2, help="outputs to print of each kind")
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()

    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    llm = start(arguments.dtype, DRAFTS)
    print_acceptance(llm, sampling, arguments.samples)
    if arguments.compare:
        sizes = (1, len(EVERYTHING))
        speculative = {size: generate(llm, sampling, size) for size in sizes}
        del llm
        gc.collect()
        plain_llm = start(arguments.dtype, 0)
        plain = {size: generate(plain_llm, sampling, size) for size in sizes}
        print_differences(arguments.dtype, plain, speculative)


def start(dtype: str, drafts: int) -> LLM:
    """Start the engine in this process, with the draft model if it has drafts to make."""
    speculation = {"method": "draft_model", "model": str(DRAFT_DIR), "num_speculative_tokens": drafts}
    return LLM(
        model=str(TARGET_DIR),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation if drafts else None,
    )


def generate(llm: LLM, sampling: SamplingParams, batch: int) -> list[list[int]]:
    """Return the output tokens of every prompt, `batch` prompts at a time."""
    outputs: list[list[int]] = []
    for first in range(0, len(EVERYTHING), batch):
        results = llm.generate(EVERYTHING[first : first + batch], sampling, use_tqdm=False)
        outputs.extend([*result.outputs[0].token_ids] for result in results)
    return outputs


def print_acceptance(llm: LLM, sampling: SamplingParams, samples: int) -> None:
    """Print the mean accepted drafts and the acceptance by position of each kind, and some outputs."""
    total = counters(llm)
    for kind, prompts in PROMPTS.items():
        before = counters(llm)
        results = llm.generate(prompts, sampling, use_tqdm=False)
        print_row(kind, before, counters(llm))
        for result in results[:samples]:
            print(f"--- {kind}\n{result.prompt}«{result.outputs[0].text}»\n", flush=True)
    print_row("all", total, counters(llm))


def print_row(kind: str, before: list[float], after: list[float]) -> None:
    """Print the acceptance between two readings of the counters."""
    steps, *accepted = (new - old for new, old in zip(after, before, strict=True))
    shares = " ".join(f"{count / steps:.2f}" for count in accepted)
    print(f"{kind:6} accepted {sum(accepted) / steps:.2f} of {DRAFTS}, by position {shares}", flush=True)


def counters(llm: LLM) -> list[float]:
    """Return the number of verified steps, and of accepted drafts at each position."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    steps = values["vllm:spec_decode_num_drafts"].value
    return [steps, *values["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def print_differences(dtype: str, plain: dict[int, list[list[int]]], speculative: dict[int, list[list[int]]]) -> None:
    """Print how many outputs differ between batch sizes and between plain and speculative decoding."""
    (alone, together), (draft_alone, draft_together) = plain.values(), speculative.values()
    for name, left, right in (
        ("plain and speculative, one at a time", alone, draft_alone),
        ("plain and speculative, all at once", together, draft_together),
        ("one at a time and all at once, plain", alone, together),
        ("one at a time and all at once, speculative", draft_alone, draft_together),
    ):
        places = [*first_differences(left, right)]
        print(f"{dtype}: {name}: {len(places)} of {len(left)} outputs differ, at {places}", flush=True)


def first_differences(left: list[list[int]], right: list[list[int]]) -> Iterable[tuple[int, int]]:
    """Yield the number of each prompt whose outputs differ, and the first token that does."""
    for prompt, outputs in enumerate(zip(left, right, strict=True)):
        places = (place for place, (one, other) in enumerate(zip(*outputs, strict=True)) if one != other)
        if (place := next(places, None)) is not None:
            yield prompt, place


if __name__ == "__main__":
    main()
