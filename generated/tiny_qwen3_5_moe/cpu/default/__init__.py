"""tiny_qwen3_5_moe on cpu, emitted by moec."""
