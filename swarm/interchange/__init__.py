"""Imports and exports models, as folders that Hugging Face's transformers writes and reads."""
