"""Tool calls in the text format of Qwen3's successors, read by vLLM's own parser."""

from __future__ import annotations

import json

import openai

from conformance.serving.checks.registry import check, expect, need
from conformance.serving.client import Choice, Server

PARAMETERS = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": PARAMETERS, "required": ["city"]}}
BEFORE = "I look."
CALLS = [{"city": "Rome", "days": 3}, {"city": 'a "b"\n{c} \u00e9'}]


def _written(arguments: dict) -> str:
    lines = [f"<parameter={name}>\n{value}\n</parameter>" for name, value in arguments.items()]
    return "\n".join(["<tool_call>", f"<function={TOOL['name']}>", *lines, "</function>", "</tool_call>"])


@check("two tool calls in one answer: streamed in pieces they parse to the same calls as unstreamed: those written")
def tool_calls_streamed(server: Server) -> str:
    need(not server.no_chat, f"no chats: {server.no_chat}")
    # Whatever the model, it can write nothing but this, token by token: the parser has to read it.
    answer = "\n".join([BEFORE, *map(_written, CALLS)])
    options = {"structured_outputs": {"choice": [answer]}, "max_tokens": len(answer), "temperature": 0}
    options |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}
    try:
        whole, streamed = (server.chat("Weather?", stream, **options).only for stream in (False, True))
    except openai.BadRequestError as error:
        need("tool" not in str(error), f"the server takes no tools: {error}")
        raise
    need(whole.calls, f"the tool parser does not read this format (--tool-call-parser qwen3_coder): {whole.text!r}")
    for how, choice in {"whole": whole, "streamed": streamed}.items():
        expect(_read(choice) == CALLS, f"{how}: {_read(choice)} for {CALLS}")
        expect({call["name"] for call in choice.calls} == {TOOL["name"]}, f"{how}: names {choice.calls}")
        expect(len({call["id"] for call in choice.calls}) == len(CALLS), f"{how}: ids {choice.calls}")
        expect(choice.finish == "tool_calls", f"{how}: finish_reason {choice.finish!r}")
        expect(choice.text.strip() == BEFORE, f"{how}: text {choice.text!r} before the calls")
    pieces = [call["pieces"] for call in streamed.calls]
    expect(min(pieces) > 1, f"the arguments came in {pieces} pieces")
    return f"2 calls with the same arguments; streamed in {' and '.join(map(str, pieces))} pieces"


def _read(choice: Choice) -> list:
    try:
        return [json.loads(call["arguments"]) for call in choice.calls]
    except ValueError:
        return [call["arguments"] for call in choice.calls]
