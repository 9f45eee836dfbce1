"""Text in and out: tokenizer, detokenizer, chat templates, stop strings."""
