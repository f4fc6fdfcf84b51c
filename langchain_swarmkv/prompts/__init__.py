"""Floor 5: from LangChain messages to the token ids of a prompt, and back from an answer.

messages (dicts for a template) -> template (text, rendered in sandbox) -> segments (ids) -> encoder
(whole prompts, shared prefixes) ... answers (message chunks). document: what agents share. session:
what the copies of a chat model share.
"""
