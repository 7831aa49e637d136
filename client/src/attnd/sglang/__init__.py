"""attnd below SGLang: `AttndHiCache`, a dynamic storage backend of HiCache.

--enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "attnd", "interface_v1": 1,
    "module_path": "attnd.sglang", "class_name": "AttndHiCache",
    "attnd": {"url": "http://127.0.0.1:8080", "revision": "COMMIT"}}'
"""

from attnd.sglang.hicache import AttndHiCache

__all__ = ["AttndHiCache"]
