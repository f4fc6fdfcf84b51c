"""Floor 5: from LangChain messages to the token ids of a prompt.

messages (dicts for a template) -> template (text) -> segments (ids) -> encoder (whole prompts,
shared prefixes).
"""
