"""kvstore for vLLM: `KVStoreConnector`, which vLLM loads by its name and this module's.

Nothing of vLLM is imported before the connector is asked for, so that the rest can be used and tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.adapters.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.adapters.vllm.connector import KVStoreConnector

    return KVStoreConnector
