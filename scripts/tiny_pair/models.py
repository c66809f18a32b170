"""The shapes of the two models, and how they are written to disk."""

import json
from pathlib import Path

import torch
from tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
TARGET_DIR = HERE / "target"
DRAFT_DIR = HERE / "draft"

# The library's default of 0.02 suits wide models: at width 128 it costs minutes before anything is learnt.
INITIALIZER_RANGE = 0.08


# What both models share.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": INITIALIZER_RANGE,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def build_target() -> Qwen3MoeForCausalLM:
    """Build the untrained target: four layers, each with twelve experts of which a token visits two."""
    config = Qwen3MoeConfig(
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=12,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.01,
        architectures=["Qwen3MoeForCausalLM"],
        **COMMON,
    )
    return Qwen3MoeForCausalLM(config)


def build_draft() -> Qwen3ForCausalLM:
    """Build the untrained draft: one dense layer with many heads, which is what counting n-grams needs."""
    config = Qwen3Config(
        num_hidden_layers=1,
        num_attention_heads=8,
        intermediate_size=512,
        architectures=["Qwen3ForCausalLM"],
        **COMMON,
    )
    return Qwen3ForCausalLM(config)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write the model in bfloat16 with its tokenizer, as a folder that vLLM loads."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(model.parameters()).dtype
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    model.to(dtype)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(folder)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
