"""Bytes and tokens: vocabularies, encoding from the last safe boundary, chats, translation between two tokenizers."""
