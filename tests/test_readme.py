"""The README is true: its programs run, its tables are those of the code, its commands exist.

``python tests/test_readme.py`` writes the generated tables anew.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import typer

from kvstore import settings
from kvstore.settings import Settings
from kvstore.sizes import format_size

TREE = Path(__file__).resolve().parents[1]
README = TREE / "README.md"
TEXT = README.read_text()
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
REWRITE = "run: PYTHONPATH=. python tests/test_readme.py"


def settings_table() -> str:
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    told = setting_texts()
    for field in fields(Settings):
        lines.append(f"| `{field.name}` | {default(field.name)} | {told[field.name]} |")
    return "\n".join(lines) + "\n"


def default(name: str) -> str:
    """A default as people write it."""
    (field,) = (one for one in fields(Settings) if one.name == name)
    if name == "path":
        return "must be given"
    if field.default is MISSING:
        return "2 to 4, by the processors"
    if field.default is None:
        return "none"
    reads_size = "_size" in repr(settings._READERS[name])
    return f"`{format_size(field.default) if reads_size and field.default else field.default}`"


def setting_texts() -> dict[str, str]:
    """The text below each field of Settings, on one line."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(settings)).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    told: dict[str, str] = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            told[field.target.id] = " ".join(str(text.value.value).split()).replace("``", "`")
    return told


def commands() -> dict[str, str]:
    """Every command, with the first sentence of its help."""
    from kvstore.tools.cli import app

    found: dict[str, str] = {}
    waiting: list[tuple[str, typer.Typer]] = [("kvstore", app)]
    while waiting:
        prefix, group = waiting.pop()
        for command in group.registered_commands:
            assert command.callback is not None
            name = command.name or command.callback.__name__.replace("_", "-")
            found[f"{prefix} {name}"] = (inspect.getdoc(command.callback) or "").split("\n\n")[0].replace("\n", " ")
        for below in group.registered_groups:
            assert below.typer_instance is not None
            name = below.name if isinstance(below.name, str) else below.typer_instance.info.name
            waiting.append((f"{prefix} {name}", below.typer_instance))
    return found


def commands_table() -> str:
    rows = "".join(f"| `{name}` | {says} |\n" for name, says in commands().items())
    return f"| command | what it does |\n|---|---|\n{rows}"


def refusals_table() -> str:
    from kvstore.adapters.transformers import REASONS

    rows = "".join(f"| `{code}` | {reason} |\n" for code, reason in REASONS.items())
    return f"<details><summary>All reasons</summary>\n\n| code | reason |\n|---|---|\n{rows}\n</details>\n"


GENERATED = {"settings": settings_table, "commands": commands_table, "refusals": refusals_table}


def rewritten(text: str) -> str:
    return BLOCK.sub(lambda found: f"<!-- generated: {found[1]} -->\n{GENERATED[found[1]]()}<!-- end -->", text)


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_table_is_what_the_code_says(name: str) -> None:
    if name == "refusals":
        pytest.importorskip("transformers")
    (found,) = (block[2] for block in BLOCK.finditer(TEXT) if block[1] == name)
    assert found == GENERATED[name](), REWRITE


def test_budgets_of_the_tiers_table_are_the_defaults() -> None:
    told = dict(
        re.findall(r"^\| `(\w+)` \| .* \| ([^|(]+?)(?: \(off\))? \|$", TEXT[: TEXT.index("## Settings")], re.MULTILINE)
    )
    defaults = {field.name: field.default for field in fields(Settings) if field.name in ("hbm", "ram", "nvme")}
    assert {name: told[name] for name in defaults} == {
        name: format_size(size) if size else "0" for name, size in defaults.items()
    }


def test_every_command_named_exists() -> None:
    named = set(re.findall(r"(?:^|`)(kvstore [a-z]+(?: (?:resume|decode|tiers|index))?)\b", TEXT, re.MULTILINE))
    assert named - {"kvstore bench"} <= set(commands())
    for script in re.findall(r"^(tools/\w+)", TEXT, re.MULTILINE):
        assert os.access(TREE / script, os.X_OK)


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([\w/.]+)\)", TEXT)
    assert links
    assert [link for link in links if not (TREE / link).is_file()] == []


def program(name: str) -> str:
    found = re.search(rf"<!-- program: {re.escape(name)} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working directory, with small budgets and a `ram` directory of its own, in the environment of `run`."""
    memory = Path("/dev/shm") / f"kvstore-test-{secrets.token_hex(8)}"
    memory.mkdir()
    (tmp_path / "environment").write_text(f"{memory}")
    yield tmp_path
    shutil.rmtree(memory)


def run(place: Path, name: str, *arguments: str, **variables: str) -> str:
    (place / name).write_text(program(name))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")},
        "KVSTORE_RAM_DIRECTORY": (place / "environment").read_text(),
        "PYTHONPATH": str(TREE),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-W", "error::RuntimeWarning:kvstore", name, *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_program_loads_what_it_saved(place: Path) -> None:
    assert run(place, "plain.py").split() == ["700", "True"]


def test_chat_program_has_ten_lines_of_code() -> None:
    assert len([line for line in program("chat.py").splitlines() if line]) == 10


def test_chat_goes_on_in_a_second_run(place: Path) -> None:
    pytest.importorskip("transformers")
    small_chat_model(place / "model")
    sizes = {"KVSTORE_RAM": "64MiB", "KVSTORE_NVME": "96MiB", "KVSTORE_NVME_SEGMENT_BYTES": "16MiB"}
    first = run(place, "chat.py", "model", "Who wrote Faust, and when was it?", **sizes)
    second = run(place, "chat.py", "model", "And what is it about?", **sizes)
    prompt, reused = numbers(first)
    assert reused == 0
    assert prompt > 32
    longer, again = numbers(second)
    assert longer > prompt + 64
    assert again >= prompt + 48


def numbers(output: str) -> tuple[int, int]:
    found = re.search(r"prompt_tokens=(\d+), reused_tokens=(\d+), refused=None", output)
    assert found is not None, output
    return int(found[1]), int(found[2])


def small_chat_model(folder: Path) -> None:
    """A random model whose tokenizer has a token a character, so that any answer is tokenized as it was generated."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(["<end>", "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.clean_up_tokenization_spaces = False
    fast.chat_template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=1024, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = [0]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)


if __name__ == "__main__":
    README.write_text(rewritten(TEXT))
    print(shlex.join(sys.argv), "wrote", README)
