"""qwen3.5-397b-a17b on tpu7x:2x2x1, emitted by moec."""
