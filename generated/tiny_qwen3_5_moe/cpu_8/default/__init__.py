"""tiny_qwen3_5_moe on cpu:8, emitted by moec."""
