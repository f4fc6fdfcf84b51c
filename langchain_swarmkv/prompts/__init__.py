"""Floor 5: from LangChain messages to the token ids of a prompt, and back from an answer.

    there    messages (dicts for a template) -> template (text, rendered in sandbox) -> segments
             (ids) -> encoder (whole prompts, shared prefixes)
    and back answering: answer_parser (over call_marks, json_scanner) -> answer_parts -> answers
             (message chunks) -> structured_output (objects)

call: what one call asks for beyond its messages. tools and schema: what callers give; held_schema
(over json_patterns): what decoding is held to of it; guides: grammars made of both; plain_json:
what users give as JSON. tool_style: asks a template how it writes calls (call_format); call_turns:
writes a conversation's so; control_marks: control tokens, as characters. counting: tokens of any
messages. document: what agents share. session: what the copies of a chat model share.
langchain_errors: errors that are LangChain's, too.
"""
