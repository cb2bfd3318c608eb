"""Conversations for supervised fine-tuning: templates, tokens, and packed samples."""
