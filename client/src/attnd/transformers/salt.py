"""The `cache_salt` of a model: a digest of all that its K and V depend on."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import pad
from xxhash import xxh3_128_digest

WORDS: Final = 2**20
"""32-bit words that one sum on a device covers."""
SUMS: Final = 2
NOT_BEHAVIOUR: Final = {"name_or_path", "warnings_issued", "hf_device_map"}
"""Attributes of models that differ between equal ones."""
Known = dict[int, tuple[torch.Tensor, str]]
"""Tensors, by their ids, and their texts."""


def salt_of(model: Any) -> str:
    """A `cache_salt` for prefixes by token ids: of models that share a service, none finds the KV
    of another.

    It covers the configuration, every value of all parameters, buffers and other tensors of the
    model's modules, and their plain attributes, such as the names of active adapters: so it differs
    between adapters, and before and after training. It knows nothing of hooks and of code. Where
    weights change in place, take a new salt afterwards. CPU tensors are read at memory's speed,
    those of a device are summed there: the README has figures. Models on different kinds of devices
    have different salts. Raises ValueError for tensors without values, as on the meta device.
    """
    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation"):
        config.pop(name, None)
    digest = blake2b(f"{type(model).__name__} {form(config, '', {})}".encode(), digest_size=16)
    known: Known = {}
    for name, module in model.named_modules():
        for key, value in sorted(vars(module).items()):
            if key not in NOT_BEHAVIOUR and "hook" not in key:
                place = f"{name}.{key}".lstrip(".")
                digest.update(f"\n{place} {form(value, place, known)}".encode())
    factors_on.cache_clear()
    return digest.hexdigest()


def form(value: Any, place: str, known: Known) -> str:
    """A text that equal values have in common; of other objects, their type."""
    match value:
        case torch.Tensor():
            if id(value) not in known:
                known[id(value)] = value, tensor_form(value, place, known)
            return known[id(value)][1]
        case None | bool() | int() | float() | str() | bytes() | torch.dtype():
            return repr(value)
        case dict():
            items = [f"{key!r}: {form(one, f'{place}.{key}', known)}" for key, one in value.items()]
            return f"{{{', '.join(sorted(items))}}}"
        case set() | frozenset():
            return f"{{{', '.join(sorted(form(one, place, known) for one in value))}}}"
        case list() | tuple():
            return f"[{', '.join(form(one, place, known) for one in value)}]"
        case _:
            return type(value).__qualname__


def tensor_form(tensor: torch.Tensor, place: str, known: Known) -> str:
    """Type, shape and digest of a tensor, and of those that it is made of or scaled by."""
    if tensor.is_meta:
        raise ValueError(
            f"{place.replace('._parameters', '')} is on the meta device, without values: load the "
            "weights first, or give a salt of your own"
        )
    head = f"{tensor.dtype} {list(tensor.shape)}"
    scales = dict(vars(tensor.quant_state)) if hasattr(tensor, "quant_state") else {}
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        return f"{head} {form([parts, context, scales], place, known)}"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        digest = xxh3_128_digest(data.numpy().data)
    else:
        digest = xxh3_128_digest(device_sums(data))
    return f"{tensor.device.type} {head} {digest.hex()} {form(scales, place, known)}"


def device_sums(data: torch.Tensor) -> bytes:
    """Two sums for every `WORDS` words of uint8 `data`, modulo 2**64: each word times an odd factor
    of its place. They are exact, and computed where the data is.

    A change of one word always changes them, any other with a probability of 1 - 2**-60: words have
    32 bits and factors 64.
    """
    data = pad(data, (0, -data.numel() % 4))
    words = (data if data.data_ptr() % 4 == 0 else data.clone()).view(torch.int32)
    factors = factors_on(data.device)
    sums = [(factors[:, : len(some)] * some).sum(1) for some in torch.split(words, WORDS)]
    return torch.stack(sums).cpu().numpy().tobytes()


@cache
def factors_on(device: torch.device) -> torch.Tensor:
    """The odd factors, int64 [SUMS, WORDS]: the same on every machine."""
    raw = np.random.PCG64(1).random_raw(SUMS * WORDS) | np.uint64(1)
    return torch.from_numpy(raw.view(np.int64)).view(SUMS, WORDS).to(device)
