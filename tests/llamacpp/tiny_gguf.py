"""Writes a tiny Llama-shaped GGUF of random weights, with a byte-level vocabulary: a real model of nobody's making.

python -m tests.llamacpp.tiny_gguf OUT.gguf
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

EMBEDDING, BLOCKS, HEADS, KV_HEADS, HEAD, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 16, 128, 4096
SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(path: Path) -> None:
    """Always the same file."""
    tokens = [*SPECIALS, *_byte_characters(), "th", "he"]
    writer = gguf.GGUFWriter(str(path), "llama")
    _describe(writer, tokens)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    writer.add_name("tiny-random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    normal = len(tokens) - len(SPECIALS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * normal)
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weights(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    noise = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (noise.standard_normal(shape) * 0.05).astype(np.float32)

    ones = np.ones(EMBEDDING, np.float32)
    writer.add_tensor("token_embd.weight", matrix(vocabulary, EMBEDDING))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", matrix(vocabulary, EMBEDDING))
    for block in range(BLOCKS):
        name = f"blk.{block}"
        writer.add_tensor(f"{name}.attn_norm.weight", ones)
        writer.add_tensor(f"{name}.attn_q.weight", matrix(HEADS * HEAD, EMBEDDING))
        writer.add_tensor(f"{name}.attn_k.weight", matrix(KV_HEADS * HEAD, EMBEDDING))
        writer.add_tensor(f"{name}.attn_v.weight", matrix(KV_HEADS * HEAD, EMBEDDING))
        writer.add_tensor(f"{name}.attn_output.weight", matrix(EMBEDDING, HEADS * HEAD))
        writer.add_tensor(f"{name}.ffn_norm.weight", ones)
        writer.add_tensor(f"{name}.ffn_gate.weight", matrix(FEED_FORWARD, EMBEDDING))
        writer.add_tensor(f"{name}.ffn_up.weight", matrix(FEED_FORWARD, EMBEDDING))
        writer.add_tensor(f"{name}.ffn_down.weight", matrix(EMBEDDING, FEED_FORWARD))


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + extra))
            extra += 1
    return characters


if __name__ == "__main__":
    write(Path(sys.argv[1]))
