"""Loads single kernels of tpu-inference out of a checkout: its package needs vllm, torch and a TPU, its kernels do not.

What a kernel imports beside jax is replaced by small modules of ours, and jax is told which chip it compiles for.
Nothing of the checkout is copied, changed or executed but the kernel's own modules.
"""

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from benchmarks.kernels.case import Refused

TPU_INFERENCE = "https://github.com/vllm-project/tpu-inference"
_LANES = 128


def kernel(module: str) -> Any:
    """A module below tpu_inference.kernels. Raises Refused where there is no checkout."""
    root = _checkout("tpu-inference", "tpu_inference", TPU_INFERENCE)
    _patch_jax()
    if "tpu_inference" not in sys.modules:
        package = _module("tpu_inference")
        package.__path__ = [str(root / "tpu_inference")]
        _module("tpu_inference.logger", init_logger=_logger)
        _module("tpu_inference.envs", USE_BATCHED_RPA_SEQ_ON_LANE=False)
        _module("tpu_inference.utils", **_utils())
    found = importlib.import_module(f"tpu_inference.kernels.{module}")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("tpu_inference.") and hasattr(loaded, "get_tpu_version"):
            vars(loaded)["get_tpu_version"] = lambda: 7
    return found


def tokamax_kernel(path: str) -> Any:
    """One file of tokamax, by its path: the package itself needs much that its kernels do not."""
    root = _checkout("tokamax", "tokamax", "tokamax (pip download --no-deps, unpacked)")
    _patch_jax()
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, root / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _checkout(folder: str, package: str, source: str) -> Path:
    peers = os.environ.get("MOEC_PEERS", "")
    if not peers:
        raise Refused(f"not installed: get {source} and give the folder above it with --peers DIR")
    root = Path(peers) / folder
    if not (root / package).is_dir():
        raise Refused(f"not installed: no {package}/ in {root.name}/ below --peers; get {source}")
    return root


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    vars(logger).update(warning_once=logger.warning, info_once=logger.info)
    return logger


def _utils() -> dict[str, Any]:
    def up(x: int, multiple: int) -> int:
        return -(-x // multiple) * multiple

    return {
        "get_padded_head_dim": lambda size: up(size, _LANES),
        "align_to": up,
        "get_dtype_packing": lambda dtype: 32 // (jnp.dtype(dtype).itemsize * 8),
        "get_device_name": lambda *_: "TPU v7",
    }


def _patch_jax() -> None:
    """There is no local chip to ask for its kind."""
    from jax._src.pallas.mosaic import tpu_info

    vars(tpu_info).update(get_device_kind=lambda: "TPU7x", get_num_device_cores=lambda: 1)
