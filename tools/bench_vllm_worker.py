"""One engine of `kvstore bench vllm`: asked line by line, it says how long its first token took.

Every line in is ``["verb", {arguments}]`` as JSON, every line out that begins with `MARK` an answer. Must not know what
is compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Literal, TypeAlias

Connector: TypeAlias = Literal["kvstore", "example", "none"]
MARK = "\x02kvstore\x03"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, model: str, connector: Connector, extra: dict[str, Any], longest: int) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        named = {
            "kvstore": {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.adapters.vllm"},
            "example": {"kv_connector": "ExampleConnector"},
        }
        transfer = None
        if connector != "none":
            transfer = KVTransferConfig(
                **named[connector],
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        self._llm: Any = LLM(
            model=model,
            kv_transfer_config=transfer,
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=longest,
            seed=0,
        )

    def ask(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Seconds until all prompts were answered with ``new_tokens`` tokens, and their cached tokens."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        spent = time.perf_counter() - began
        return {"seconds": spent, "cached": [answer.num_cached_tokens for answer in answers]}

    def reset(self) -> bool:
        """Empty the engine's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> None:
        """End the engine in order."""
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Serve until the input ends."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    engine = Engine(**json.loads(sys.argv[1]))
    print(MARK + json.dumps("up"), flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        print(MARK + json.dumps(getattr(engine, verb)(**arguments)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
