"""Models of transformers whose attention and KV cache attnd serves: `AttndCache`.

Importing this registers `attn_implementation="attnd"`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from attnd.transformers.attention import NAME, attnd_attention, attnd_mask
from attnd.transformers.cache import AttndCache
from attnd.transformers.geometry import pool_settings

AttentionInterface.register(NAME, attnd_attention)
AttentionMaskInterface.register(NAME, attnd_mask)

__all__ = ["AttndCache", "pool_settings"]
