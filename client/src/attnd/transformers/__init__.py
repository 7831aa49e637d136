"""Models of transformers whose attention and KV cache attnd serves: `AttndCache`.

A program with a model runner of its own finds the model's pool and scoring in `geometry_of`.
Importing this registers `attn_implementation="attnd"`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from attnd.transformers.attention import NAME, attnd_attention, attnd_mask
from attnd.transformers.cache import AttndCache
from attnd.transformers.geometry import Geometry, check_pool, geometry_of, pool_settings
from attnd.transformers.salt import salt_of

AttentionInterface.register(NAME, attnd_attention)
AttentionMaskInterface.register(NAME, attnd_mask)

__all__ = [
    "AttndCache",
    "Geometry",
    "check_pool",
    "geometry_of",
    "pool_settings",
    "salt_of",
]
