"""`attach`: after it, the model's own `generate` resumes stored prefixes and stores what it computes.

Owns the wiring: a wrapper over the instance's `generate`, hooks around its forward, and taking both off again. What
happens in between is `run`'s. A store or an adapter that fails costs speed, never the request.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from kvstore.adapters.temporaries import keep_temporaries
from kvstore.adapters.transformers import allow
from kvstore.adapters.transformers.layout import ModelLayout, Refused, unwrap
from kvstore.adapters.transformers.pool import Pool
from kvstore.adapters.transformers.rows import ADAPTER
from kvstore.adapters.transformers.run import Ground, Plan, Run
from kvstore.adapters.transformers.saver import Saver
from kvstore.errors import UnsupportedError
from kvstore.events import Cause, Fault, Miss, Notice, Refusal
from kvstore.gate import Gate

if TYPE_CHECKING:
    from kvstore.match import Namespace
    from kvstore.store import Store

_RUN: ContextVar[tuple[Attachment, Run | None] | None] = ContextVar("kvstore_run", default=None)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `generate`: tokens of its prompt (all rows), those of them that were not run, why not if refused."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What `attach` was given; see there."""

    salt: str | bytes
    label: str
    block_tokens: int | None
    least_tokens: int
    pool_bytes: int
    gate: bool
    counted: bool


class Attachment:
    """A model that uses a store. Also a context manager that detaches at its end.

    ``last`` tells of the request that ended last, ``total`` of all.
    """

    def __init__(self, model: Any, store: Store, options: Options) -> None:
        self.model = model
        self.store = store
        self.last = Request()
        self.total = Request()
        self.options = options
        self._model_layout = ModelLayout(model, options.block_tokens)
        self._pool = Pool(options.pool_bytes)
        self._saver = Saver(store.events)
        self._gate = Gate(on=options.gate, floor=options.least_tokens)
        self._lock = Lock()
        self._spaces: dict[bytes, Any] = {}
        self._warned: set[str] = set()
        self._original = model.generate
        self._before = vars(model).get("generate")
        self._arguments = inspect.signature(type(model).generate)
        self._forward_arguments = inspect.signature(model.forward)
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self, "_enter"), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "_leave"), with_kwargs=True),
        ]
        self._wrapper = _Generate(self)
        model.generate = self._wrapper

    def detach(self) -> None:
        """Put the model back as it was and finish the saves that wait. May be called again."""
        for hook in self._hooks:
            hook.remove()
        if vars(self.model).get("generate") is self._wrapper:
            if self._before is None:
                del self.model.generate
            else:
                self.model.generate = self._before
        self._wrapper.attachment = None
        self._saver.close()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything computed so far is saved; False where ``timeout`` seconds were not enough."""
        return self._saver.flush(timeout)

    def refusal(self) -> str | None:
        """Why the model in its present state is left alone, as a code of `allow.REASONS`; None where it is served."""
        try:
            self._model_layout.within(self.store.device)
        except Refused as refused:
            return refused.reason
        return None

    def namespace(self) -> Namespace:
        """Where requests of now are kept. Raises Refused for a model that is left alone."""
        space: Namespace = self._ground().space
        return space

    def warm(self, tokens: int) -> None:
        """Compute the weights digest, and have memory for ``tokens`` tokens lie ready."""
        try:
            ground = self._ground()
        except Refused as refused:
            self._refuse(refused.reason, 0)
            return
        limit = getattr(self.model.config, "max_position_embeddings", None) or tokens
        tokens = min(tokens, limit)
        if tokens > 0 and self._model_layout.device.type == "cpu":
            keep_temporaries()
            self._pool.warm(ground.layout.token_bytes() * tokens)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self

    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the wrapper does in the model's stead."""
        run = self._open(args, kwargs)
        token = _RUN.set((self, run))
        result = None
        try:
            result = self._original(*args, **kwargs)
            return result
        finally:
            _RUN.reset(token)
            if run is not None:
                self._close(run, result)

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        prompt_tokens = 0
        try:
            arguments = _flat(self._arguments.bind(self.model, *args, **kwargs))
            config = allow.resolve(self.model, arguments.get("generation_config"), kwargs)
            prompt = _prompt(arguments, config)
            prompt_tokens = prompt.numel() if prompt is not None else 0
            reason = allow.refuse_mode(config, arguments)
            if reason is None:
                return Run(self._ground(), _plan(config, arguments, prompt))
        except Refused as refused:
            reason = refused.reason
        except Exception as error:  # noqa: BLE001  whatever is wrong with the call is for `generate` itself to say
            reason = self._fault("open", error)
        self._refuse(reason, prompt_tokens)
        return None

    def _close(self, run: Run, result: Any) -> None:
        prompt = run.prompt_columns * len(run.pads) - sum(run.pads)
        reused = sum(max(0, run.loaded - pad) for pad in run.pads)
        if run.prompt_columns:
            self._note(Request(prompt, reused))
        try:
            run.finish(result)
        except Exception as error:  # noqa: BLE001  the answer is there already
            self._fault("save", error)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run(module)
        if run is None:
            return None
        ids = kwargs.get("input_ids")
        tokens = ids.numel() if isinstance(ids, torch.Tensor) else 0
        try:
            changed = run.before(self._named(args, kwargs))
        except Refused as refused:
            _RUN.set((self, None))
            reason = refused.reason
        except Exception as error:  # noqa: BLE001  the forward's own arguments are untouched: it runs uncached
            _RUN.set((self, None))
            run.lost()
            reason = self._fault("load", error)
        else:
            return None if changed is None else ((), changed)
        self._refuse(reason, tokens)
        return None

    def _leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        run = self._run(module)
        if run is None:
            return
        try:
            run.after(self._named(args, kwargs))
        except Exception as error:  # noqa: BLE001  what this forward computed is there already
            run.saving = False
            self._fault("note", error)

    def _run(self, module: Any) -> Run | None:
        entry = _RUN.get()
        return entry[1] if entry is not None and entry[0] is self and module is self.model else None

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return _flat(self._forward_arguments.bind_partial(*args, **kwargs)) if args else kwargs

    def _ground(self) -> Ground:
        """What a run of now stands on. Raises Refused."""
        present, options = self._model_layout.within(self.store.device), self.options
        with self._lock:
            space = self._spaces.get(present.layout.fingerprint)
            if space is None:
                space = self.store.namespace(present.layout, salt=options.salt, label=options.label)
                self._spaces[present.layout.fingerprint] = space
        return Ground(
            self.store, space, present, self._model_layout, self._pool, self._saver, self._gate, options.counted
        )

    def _refuse(self, reason: str, tokens: int) -> None:
        self._note(Request(tokens, 0, reason))
        if self.options.counted:
            self.store.events.emit(Refusal(ADAPTER, reason))
            if tokens:
                self.store.events.emit(Miss(Cause.REFUSED, tokens))
        if reason not in self._warned and reason != "fault":
            self._warned.add(reason)
            problem = f"kvstore leaves this request uncached ({reason}): {allow.explain(reason)}"
            try:
                warnings.warn(problem, stacklevel=4)
            except UserWarning:  # warnings are errors in this process: a refusal must not become one
                self.store.events.emit(Notice("request uncached", problem))

    def _fault(self, what: str, error: Exception) -> str:
        self.store.events.emit(Fault("adapter", what, repr(error)))
        return "fault"

    def _note(self, request: Request) -> None:
        with self._lock:
            self.last = request
            total = self.total
            self.total = replace(
                total,
                prompt_tokens=total.prompt_tokens + request.prompt_tokens,
                reused_tokens=total.reused_tokens + request.reused_tokens,
            )


def attach(
    model: Any,
    store: Store,
    *,
    salt: str | bytes = "",
    label: str | None = None,
    block_tokens: int | None = None,
    least_tokens: int = 16,
    warm_tokens: int = 2048,
    pool_bytes: int = 1 << 30,
    gate: bool = False,
    counted: bool = True,
) -> Attachment:
    """Let ``model.generate`` resume from ``store`` and save to it.

    model: a causal transformers model, also inside PEFT's or torch.compile's wrapper. salt: requests under different
    salts never see each other's KV. label: how listings name the model. block_tokens: tokens a block, a choice that
    depends on the model when left out; blocks of another size are another namespace. least_tokens: shorter prefixes
    are not worth a load. warm_tokens: memory made ready for a request of so many tokens. pool_bytes: memory kept
    between requests. gate: load only what, by measurement, is faster to load than to run again. counted: False where
    nobody asks and calls only make KV resident, as those of `kvstore warm`: nothing counts as asked for, served, missed
    or refused.

    Computes a digest of every byte of the weights. A model that is not on the allow-list is attached all the same, runs
    uncached, and says so once. Raises UnsupportedError for what is not a generating model, or is attached already.
    """
    inner = unwrap(model)
    if not hasattr(inner, "generate") or not hasattr(inner, "generation_config"):
        raise UnsupportedError(f"{type(inner).__name__} has no generate", "attach the model with a language-model head")
    if isinstance(vars(inner).get("generate"), _Generate):
        raise UnsupportedError("this model is attached already", "call detach() on its attachment first")
    chosen = label if label is not None else _label(inner)
    attachment = Attachment(inner, store, Options(salt, chosen, block_tokens, least_tokens, pool_bytes, gate, counted))
    attachment.warm(warm_tokens)
    return attachment


class _Generate:
    """Stands in the place of a model's `generate`. A copy of the model gets its class's own back."""

    def __init__(self, attachment: Attachment) -> None:
        functools.update_wrapper(self, attachment._original)
        self.attachment: Attachment | None = attachment
        self._original = attachment._original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attachment is None:
            return self._original(*args, **kwargs)
        return self.attachment.generate(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = getattr(self._original, "__self__", None)
        copied = memo.get(id(model))
        return types.MethodType(type(copied).generate, copied) if copied is not None else self._original


class _Hook:
    """A hook that a copy of the model carries without effect: it looks for the model it was made for."""

    def __init__(self, attachment: Attachment, method: str) -> None:
        self._call = getattr(attachment, method)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those of ``**kwargs`` among them."""
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def _prompt(arguments: Mapping[str, Any], config: GenerationConfig) -> torch.Tensor | None:
    """The prompt as `generate` will expand it; None where it cannot be told from the arguments."""
    ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        return None
    copies = config.num_return_sequences or 1
    return ids.repeat_interleave(copies, dim=0) if copies > 1 else ids


def _plan(config: GenerationConfig, arguments: Mapping[str, Any], prompt: torch.Tensor | None) -> Plan:
    columns = prompt.shape[1] if prompt is not None else 0
    room = config.max_new_tokens or max((config.max_length or 0) - columns, 0) or 64
    given = any(arguments.get(name) is not None for name in ("cache", "past_key_values"))
    ends = frozenset({*_ids(config.eos_token_id), *_ids(config.pad_token_id)})
    return Plan(
        prompt if config.prefill_chunk_size else None, room, given or bool(config.return_dict_in_generate), ends
    )


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return value if isinstance(value, list | tuple) else (value,)


def _label(model: Any) -> str:
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return name.rstrip("/").rsplit("/", 1)[-1]
