"""Tensor parallelism: every rank has its own shard, and a hit is what all of them have. LoRAs are other models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import Engine, Place, prompt, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ASKED = prompt(700, 41)
TWO = {"tensor_parallel_size": 2}
BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_ranks_resume_together_and_not_from_one(tiny: Path, plain: Engine, place: Place) -> None:
    with Engine(tiny, place.settings, processes=True, environment=BINDING, **TWO) as engine:
        assert engine.generate(ASKED)[0]["cached"] == 0
        engine.generate(prompt(20, 9))
        assert engine.end() == 0
    with Engine(tiny, place.settings, processes=True, environment=BINDING, **TWO) as engine:
        answer = engine.generate(ASKED)[0]
        assert answer["cached"] == len(ASKED) - 1
        assert answer["ids"] == plain.generate(ASKED)[0]["ids"]
        place.damage(ASKED, 2)
        engine.do("reset")
        assert engine.generate(ASKED)[0]["ids"] == answer["ids"]


LORA = """
import json, sys
import subprocess
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file

torch.manual_seed(3)
folder = Path(sys.argv[1])
folder.mkdir()
settings = dict(peft_type="LORA", r=4, lora_alpha=64, target_modules=["v_proj"], task_type="CAUSAL_LM", bias="none")
(folder / "adapter_config.json").write_text(json.dumps(settings))
names = [f"base_model.model.model.layers.{layer}.self_attn.v_proj" for layer in range(3)]
sides = {"lora_A": (4, 64), "lora_B": (64, 4)}
save_file({f"{n}.{s}.weight": torch.randn(shape) for n in names for s, shape in sides.items()},
          folder / "adapter_model.safetensors")
"""


def test_a_lora_and_its_base_model_do_not_see_each_other(tiny: Path, place: Place, tmp_path: Path) -> None:
    adapter, asked = tmp_path / "adapter", prompt(500, 51)
    subprocess.run([sys.executable, "-c", LORA, str(adapter)], check=True)
    with Engine(tiny, place.settings, enable_lora=True, max_lora_rank=8) as engine:
        base = engine.generate(asked)[0]
        engine.do("reset")
        tuned = engine.generate(asked, lora=str(adapter))[0]
        assert (base["cached"], tuned["cached"]) == (0, 0)
        assert base["ids"] != tuned["ids"]
        engine.generate(prompt(20, 9))
        wait_for(lambda: place.holders(asked) == 2)
        for lora, first in ((None, base), (str(adapter), tuned)):
            engine.do("reset")
            again = engine.generate(asked, lora=lora)[0]
            assert (again["cached"], again["ids"]) == (len(asked) - 1, first["ids"])
