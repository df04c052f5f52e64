"""kvstore for Hugging Face transformers."""
