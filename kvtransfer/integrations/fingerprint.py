"""A name for a model's weights, so that no two models share KV by mistake."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

_ELEMENTS = 4096


def fingerprint(model: PreTrainedModel) -> str:
    """The model's type and 32 hex digits: SHA-256 over the configuration, and over parameters and buffers by name,
    shape, dtype and 4,096 elements each, spread evenly.

    Training changes nearly every element, so two revisions differ. An edit of a few single weights may go unseen: name
    such a model yourself. Reads a few megabytes and waits for the device.
    """
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(picked.view(torch.uint8).cpu().numpy().tobytes())
    return f"{model.config.model_type}-{digest.hexdigest()[:32]}"
