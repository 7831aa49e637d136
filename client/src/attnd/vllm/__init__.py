"""attnd below vLLM: `AttndTier`, a secondary tier of vLLM's `TieringOffloadingSpec`.

--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
    "secondary_tiers": [{"type": "AttndTier", "module_path": "attnd.vllm",
                         "url": "http://127.0.0.1:8080"}]}}'
"""

from attnd.vllm.tier import AttndTier

__all__ = ["AttndTier"]
