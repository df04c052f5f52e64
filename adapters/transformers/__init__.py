"""kvstore for Hugging Face transformers: `attach` to a model, or `load` and `save` around a loop of one's own."""

from kvstore.adapters.transformers.allow import REASONS
from kvstore.adapters.transformers.attach import Attachment, Request, attach
from kvstore.adapters.transformers.growing import GrowingCache
from kvstore.adapters.transformers.layout import Refused
from kvstore.adapters.transformers.plain import Loading, load, save

__all__ = ["REASONS", "Attachment", "GrowingCache", "Loading", "Refused", "Request", "attach", "load", "save"]
