"""Converts between bytes and tokens: vocabularies, incremental encoding, chats, translation between tokenizers."""
