"""An MCP server that lists its tools incorrectly: `python -m tests.agents.faulty_mcp_server FAULT`.

It implements the protocol over stdio by itself, because libraries refuse to send such lists.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def list_tools(fault: str, cursor: str | None) -> dict[str, Any]:
    """Return the page of the list of tools at a cursor."""
    page = int(cursor or 0)
    schema: Any = {"type": "object", "properties": {}}
    if fault == "list as schema":
        schema = ["a", "b"]
    if fault == "schema of a string":
        schema = {"type": "string"}
    if fault == "list of properties":
        schema = {"type": "object", "properties": ["a", "b"]}
    name = "look" if fault == "same tool" else f"look{page}"
    answer = {"tools": [{"name": name, "inputSchema": schema}]}
    if fault == "endless":
        return {**answer, "nextCursor": str(page + 1)}
    if fault == "same cursor":
        # the names differ, so that only the cursor shows that the list does not end
        return {"tools": [], "nextCursor": "1"}
    if fault == "same tool" and page == 0:
        return {**answer, "nextCursor": "1"}
    return answer


def main(fault: str) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:  # a notification
            continue
        parameters = request.get("params") or {}
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] == "initialize":
            answer["result"] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "faulty", "version": "1"},
            }
        elif request["method"] == "tools/list":
            answer["result"] = list_tools(fault, parameters.get("cursor"))
        else:
            answer["error"] = {"code": -32601, "message": "method not found"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
