"""The same prompts through Hugging Face transformers (needs the extra `oracle`); one JSON command per line."""

import json
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

THREADS = 2


@torch.inference_mode()
def run(model, vocab: int, prompt_tokens: int, batch: int, decode_steps: int):
    """(prefill seconds, seconds of all decode steps, ids of the first prompt); only last logits are computed."""
    prompts = torch.from_numpy(np.random.default_rng(0).integers(3, vocab, (batch, prompt_tokens)))
    start = time.perf_counter()
    out = model(prompts, use_cache=True, logits_to_keep=1)
    tokens = out.logits[:, -1].argmax(-1)
    ids = [int(tokens[0])]
    prefilled = time.perf_counter()
    cache = out.past_key_values
    for _ in range(decode_steps):
        out = model(tokens[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1)
        ids.append(int(tokens[0]))
    return prefilled - start, time.perf_counter() - prefilled, ids


def main() -> None:
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        command = json.loads(line)
        args = model.config.vocab_size, int(sys.argv[2]), command["batch"], command["decode_steps"]
        prefill, decode, ids = run(model, *args)
        print(json.dumps({"prefill_s": prefill, "decode_s": decode, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
