"""attnd below LMCache: `AttndL2Adapter`, an L2 adapter that LMCache loads as a plugin.

--l2-adapter '{"type": "plugin", "module_path": "attnd.lmcache",
               "class_name": "AttndL2Adapter",
               "adapter_params": {"url": "http://127.0.0.1:8080", "revision": "COMMIT"}}'
"""

from attnd.lmcache.adapter import AttndL2Adapter

__all__ = ["AttndL2Adapter"]
