"""Every way of generating gives what the unattached model gives, cold and resumed, and is served or refused by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig  # noqa: E402

from kvstore.adapters.transformers import Attachment, attach  # noqa: E402
from kvstore.adapters.transformers.layout import cache_argument  # noqa: E402
from kvstore.events import Counters  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False}
ROWS = 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def left_padded(ids: Any) -> dict[str, Any]:
    rows = ids(40, rows=ROWS)
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    mask[2, :23] = 0
    return {"input_ids": rows * mask, "attention_mask": mask}


def sampled(model: Any, ids: Any, **more: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(ids(40), max_new_tokens=6, do_sample=True, top_k=9, **more)


def filled(model: Any, ids: Any) -> Any:
    cache = DynamicCache()
    with torch.no_grad():
        model(ids(40)[:, :20], use_cache=True, **{cache_argument(model): cache})
    return model.generate(ids(40), **GREEDY, **{cache_argument(model): cache})


def own_empty(model: Any, ids: Any) -> Any:
    cache = DynamicCache()
    out = model.generate(ids(40), **GREEDY, **{cache_argument(model): cache})
    assert cache.get_seq_length() == out.shape[1] - 1
    with torch.no_grad():  # the user goes on with it
        more = model(out[:, -1:], use_cache=True, **{cache_argument(model): cache})
    return out, more.logits


def own_static(model: Any, ids: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    return model.generate(ids(40), **GREEDY, **{cache_argument(model): cache})


def offset_positions(model: Any, ids: Any) -> Any:
    positions = torch.arange(3, 43)[None]
    return model.generate(ids(40), position_ids=positions, **GREEDY)


def returned(model: Any, ids: Any) -> Any:
    out = model.generate(ids(40), return_dict_in_generate=True, output_scores=True, output_logits=True, **GREEDY)
    return out.sequences, *out.scores, *out.logits


def streamed(model: Any, ids: Any) -> Any:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.put_in: list[Any] = []

        def put(self, value: Any) -> None:
            self.put_in.append(value.reshape(-1))

        def end(self) -> None:
            self.put_in.append(torch.tensor([-1]))

    streamer = Streamer()
    return model.generate(ids(40), streamer=streamer, **GREEDY), torch.cat(streamer.put_in)


class Stop(Exception):
    """What a user's own callback raises."""


def stopped(model: Any, ids: Any) -> Any:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        seen = 0

        def put(self, value: Any) -> None:
            self.seen += 1
            if self.seen == 4:
                raise Stop("the user has read enough")

        def end(self) -> None:
            raise AssertionError

    return model.generate(ids(40), streamer=Streamer(), **GREEDY)


def with_gradients(model: Any, ids: Any) -> Any:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None:
            torch.set_grad_enabled(True)

        def end(self) -> None:
            torch.set_grad_enabled(False)

    return model.generate(ids(40), streamer=Streamer(), **GREEDY)


def ends_early(model: Any, ids: Any) -> Any:
    batch = left_padded(ids)
    plain = model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=int(plain[1, 42]))


def trained(model: Any, ids: Any) -> Any:
    model.train()
    try:
        return model.generate(ids(40), **GREEDY)
    finally:
        model.eval()


def under_inference_mode(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        first = model.generate(ids(40), **GREEDY)
    return first.clone(), model.generate(ids(40), **GREEDY)


def cast(model: Any, ids: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.generate(ids(40), **GREEDY)


def padded_right(model: Any, ids: Any) -> Any:
    mask = torch.ones(ROWS, 40, dtype=torch.long)
    mask[1, 30:] = 0
    return model.generate(ids(40, rows=ROWS), attention_mask=mask, **GREEDY)


def masked_inside(model: Any, ids: Any) -> Any:
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 10:12] = 0
    return model.generate(ids(40), attention_mask=mask, **GREEDY)


def chunked(model: Any, ids: Any) -> Any:
    return model.generate(ids(40), prefill_chunk_size=7, cache_implementation="dynamic", **GREEDY)


def chunked_rows(model: Any, ids: Any) -> Any:
    batch = {name: value[:2] for name, value in left_padded(ids).items()}
    return model.generate(**batch, prefill_chunk_size=11, cache_implementation="dynamic", **GREEDY)


def piped(model: Any, ids: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    raw = Tokenizer(WordLevel({f"t{number}": number for number in range(97)}, unk_token="t0"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="t0", unk_token="t0")
    text = " ".join(f"t{int(token)}" for token in ids(40)[0])
    answer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **GREEDY)
    return answer[0]["generated_text"]


def in_threads(model: Any, ids: Any) -> Any:
    answers: dict[int, Any] = {}

    def ask(seed: int) -> None:
        answers[seed] = model.generate(ids(40, seed=seed), **GREEDY)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (7, 8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([answers[seed] for seed in (7, 8, 9)])


def nested(model: Any, ids: Any) -> Any:
    inner: list[Any] = []

    class Asks(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] == 42:
                inner.append(model.generate(ids(20, seed=4), **GREEDY))
                inner.append(model(ids(20, seed=4)).logits)
            return scores

    return model.generate(ids(40), logits_processor=transformers.LogitsProcessorList([Asks()]), **GREEDY), *inner


@dataclass(frozen=True)
class Case:
    """One way of generating. refused: the reason it must run uncached for; None where it must be served."""

    name: str
    call: Callable[[Any, Any], Any]
    refused: str | None = None
    raises: bool = False


def simple(name: str, refused: str | None = None, raises: bool = False, **arguments: Any) -> Case:
    return Case(name, lambda model, ids: model.generate(ids(40), **{**GREEDY, **arguments}), refused, raises)


CASES = [
    simple("greedy"),
    Case("ids by name", lambda model, ids: model.generate(input_ids=ids(40), **GREEDY)),
    Case("by max_length", lambda model, ids: model.generate(ids(40), max_length=47, do_sample=False)),
    Case("a config of the user's", lambda model, ids: model.generate(ids(40), GenerationConfig(**GREEDY))),
    simple("one new token", max_new_tokens=1),
    simple("more than the room made at first", max_new_tokens=90),
    Case("sampling", sampled),
    Case("several answers", lambda model, ids: sampled(model, ids, num_return_sequences=3)),
    Case("three rows", lambda model, ids: model.generate(ids(40, rows=ROWS), **GREEDY)),
    Case("three rows, left padding", lambda model, ids: model.generate(**left_padded(ids), **GREEDY)),
    Case(
        "left padding, several answers",
        lambda model, ids: model.generate(
            **left_padded(ids), num_return_sequences=2, max_new_tokens=6, num_beams=1, do_sample=True, top_k=1
        ),
    ),
    Case("rows that end early", ends_early),
    Case("streamer", streamed),
    Case("an empty cache of the user's", own_empty),
    Case("scores and logits returned", returned),
    Case("chunked prefill", chunked),
    Case("chunked prefill, left padding", chunked_rows),
    simple("classifier-free guidance", guidance_scale=1.5),
    simple("repetition penalty", repetition_penalty=1.3),
    Case("pipeline", piped),
    Case("threads", in_threads),
    Case("a call inside a call", nested),
    Case("an exception in the middle", stopped, raises=True),
    Case("inference mode", under_inference_mode),
    Case(
        "torch.compile's wrapper", lambda model, ids: torch.compile(model, backend="eager").generate(ids(40), **GREEDY)
    ),
    Case("right padding", padded_right, "right-padding"),
    Case("a hole in the mask", masked_inside, "mask"),
    Case("own positions", offset_positions, "own-positions"),
    simple("beams", "beams", num_beams=2),
    Case("sampled beams", lambda model, ids: sampled(model, ids, num_beams=2), "beams"),
    simple("prompt lookup", "prompt-lookup", prompt_lookup_num_tokens=3),
    Case(
        "assisted", lambda model, ids: model.generate(ids(40), assistant_model=assistant(model), **GREEDY), "assisted"
    ),
    simple("contrastive", "contrastive", raises=True, penalty_alpha=0.5, top_k=4),
    simple("DoLa", "dola", raises=True, dola_layers="low"),
    simple("custom loop", "custom-generate", custom_generate=lambda model, input_ids, **_: input_ids),
    simple("static cache", "static-cache", cache_implementation="static"),
    simple("quantized cache", "quantized-cache", raises=True, cache_implementation="quantized"),
    simple("offloaded cache", "offloaded-cache", cache_implementation="offloaded"),
    simple("a cache kind of other models", "other-cache", cache_implementation="hybrid"),
    simple("constrained", "constrained", raises=True, num_beams=2, force_words_ids=[[5]]),
    Case("a static cache of the user's", own_static, "foreign-cache"),
    simple("no cache", "no-cache", use_cache=False),
    simple("hidden states", "outputs", return_dict_in_generate=True, output_hidden_states=True),
    Case("a filled cache", filled, "filled-cache"),
    Case(
        "embeddings",
        lambda model, ids: model.generate(inputs_embeds=model.get_input_embeddings()(ids(40)).detach(), **GREEDY),
        "inputs-embeds",
    ),
    Case("training mode", trained, "training"),
    Case("gradients", with_gradients, "gradients"),
    Case("autocast", cast, "autocast"),
]


def assistant(model: Any) -> Any:
    helper = vars(assistant).setdefault("model", None)
    if helper is None:
        config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1})
        torch.manual_seed(1)
        helper = vars(assistant)["model"] = type(model)(config).eval()
        helper.generation_config.eos_token_id = None
    return helper


def outcome(case: Case, model: Any, ids: Any) -> Any:
    try:
        return case.call(model, ids)
    except Exception as error:  # noqa: BLE001  compared with what the unattached model raises
        return type(error), str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_of_generating_is_as_without_the_store(
    case: Case, tiny: Any, ids: Any, store: Any, counted: Counters
) -> None:
    model = tiny("llama")
    expected = outcome(case, model, ids)
    assert (isinstance(expected, tuple) and isinstance(expected[0], type)) or not case.raises
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(model, store, least_tokens=1, warm_tokens=64) as attachment:
            for turn in ("cold", "resumed"):
                close_to(outcome(case, model, ids), expected, turn)
                attachment.flush()
            check_service(case, attachment, counted)
    said = [str(entry.message) for entry in caught if "kvstore leaves" in str(entry.message)]
    assert len(said) == (case.refused is not None)
    assert not any(name.startswith("fault") for name in counted.snapshot())


def check_service(case: Case, attachment: Attachment, counted: Counters) -> None:
    assert attachment.last.refused == case.refused
    refusals = {name: n for name, n in counted.snapshot().items() if name.startswith("refuse.")}
    if case.refused is None:
        assert attachment.last.reused_tokens > 0
        assert attachment.last.reused_tokens < attachment.last.prompt_tokens
        assert not refusals
    else:
        assert attachment.total.reused_tokens == 0
        assert refusals == {f"refuse.transformers.{case.refused}": 2}


def close_to(found: Any, expected: Any, turn: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape, turn
        if expected.dtype.is_floating_point:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=turn)
        else:
            assert torch.equal(found, expected), turn
    elif isinstance(expected, tuple) and expected and isinstance(expected[0], torch.Tensor):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            close_to(left, right, turn)
    elif isinstance(expected, transformers.utils.ModelOutput):
        close_to(found.sequences, expected.sequences, turn)
    else:
        assert found == expected, turn
